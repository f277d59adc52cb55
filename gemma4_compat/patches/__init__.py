"""One file a patch; see CONTRIBUTING.md for how to add one."""
