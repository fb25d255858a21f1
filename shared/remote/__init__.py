"""Folders behind a URL: object stores, web servers, the Hub."""
