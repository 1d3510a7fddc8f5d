"""Parameters kept in other formats than they are used in, and the products they are found by."""
