"""The tiny checkpoint, and the situations in which a reproduction shows a defect."""
