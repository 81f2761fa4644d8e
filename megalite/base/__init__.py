"""The ground of all packages: errors, exit codes, signals that ask to stop, outputs, tables, and small files."""
