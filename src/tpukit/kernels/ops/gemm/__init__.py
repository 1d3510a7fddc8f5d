"""Matrix products in every precision, and over a mesh axis."""
