"""What the shim costs and gives, a folder for each subject; README.md has the questions and commands."""
