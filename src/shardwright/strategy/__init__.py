"""Strategy files. pydantic lives in this package only, and is imported when a `Strategy` is first touched."""
