"""HTML pages without a library: style, tables and charts."""
