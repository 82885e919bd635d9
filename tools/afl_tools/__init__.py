"""What writes and checks the generated parts of the project."""
