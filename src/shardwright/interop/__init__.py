"""Bridges to other libraries, one package or module each; nothing here is imported unless asked for."""
