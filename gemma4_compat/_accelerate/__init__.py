"""What hangs on a model: accelerate's hooks and device maps, and what this package leaves there (:mod:`attached`)."""
