"""How an op runs on the pieces of arrays that are split over a mesh."""
