"""A module's forward as a compiled program: kept, explained when compiled again, and stoppable."""
