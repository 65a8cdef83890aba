"""Rows of workbooks (XLSX, ODS) and of databases (SQLite, DuckDB), as Arrow files."""
