"""Rules between configuration values, a module for each section."""
