"""Those who give and take pods: one folder each, behind one protocol."""
