"""What the shim costs where it has nothing to do: an import, an idle call, the lock of a split model."""
