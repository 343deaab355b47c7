"""Strategy files: read, check, overlay and compile them. `model` has the class `Strategy`.

Everything about the file format belongs here. pydantic is used nowhere else. This `__init__`
imports nothing, so pydantic is imported only with `Strategy`. How compiled rules shard an array is
decided in `resolution`, not here.
"""
