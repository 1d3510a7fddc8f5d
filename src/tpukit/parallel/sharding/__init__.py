"""How the arrays of a model are split over a mesh."""
