"""Strategy files: read, check, overlay and compile them. `model` has the class `Strategy`.

Everything about the file format belongs here, and pydantic is used nowhere else. This package
imports no module by itself, so pydantic is loaded only when `Strategy` is. What compiled rules mean
for an array is decided in `resolution`.
"""
