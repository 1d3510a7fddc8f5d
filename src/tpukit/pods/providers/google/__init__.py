"""What the providers of Google's share: who asks, and what names may be made of."""
