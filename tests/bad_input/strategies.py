"""Malformed strategy files and overlays."""

from __future__ import annotations

import shardwright as sw
from tests.bad_input.scene import Call, Scene

HEAD = "version = 1\n[mesh]\ndp = 2\ntp = 4\n"


def file(text: str, name: str = "bad.toml") -> Call:
    return lambda scene: sw.Strategy.load(scene.write(text, name))


def compiled(text: str) -> Call:
    return lambda scene: sw.Strategy.load(scene.write(text)).compile()


def dump_elsewhere(scene: Scene) -> None:
    scene.strategy.dump(scene.folder / "scene.yaml")


CASES: dict[str, Call] = {
    "a missing file": lambda scene: sw.Strategy.load(scene.folder / "absent.toml"),
    "a preset's name used as a file": lambda scene: sw.Strategy.load(scene.folder / "fsdp_tp.toml"),
    "load of an unknown file type": lambda scene: sw.Strategy.load(scene.folder / "scene.yaml"),
    "dump to an unknown file type": dump_elsewhere,
    "dump into a missing folder": lambda scene: scene.strategy.dump(
        scene.folder / "nowhere" / "scene.toml"
    ),
    "an unknown preset": lambda scene: sw.Strategy.preset("fdsp_tp"),
    "invalid TOML": file('version = 1\n[rules\nbatch = "dp"\n'),
    "an unterminated TOML string": file('version = 1\n[rules]\nbatch = "dp'),
    "a key twice": file('version = 1\n[rules]\nbatch = "dp"\nbatch = "tp"\n'),
    "invalid JSON": file('{"version": 1,\n "rules": {"batch" "dp"}}', "bad.json"),
    "a TOML text without quotes": file(HEAD + "[rules]\nkv_head = tp | -  # whole\n"),
    "a JSON key twice": file('{"version": 1, "version": 1}', "bad.json"),
    "a JSON list": file("[1, 2]", "bad.json"),
    "a table spelled wrong": file(HEAD + '[ruels]\nbatch = "dp"\n'),
    "a table of a mode spelled wrong": file(HEAD + '[modes.decoding]\nbatch = "dp"\n'),
    "a rule that is a list": file(HEAD + '[rules]\nbatch = ["dp", "tp"]\n'),
    "a list for a file's text": file('version = 1\nname = ["x"]\n'),
    "a mesh axis in capitals": file(HEAD + '[rules]\nbatch = "DP"\n'),
    "a star for a plus": file(HEAD + '[rules]\nbatch = "dp*tp"\n'),
    "a star and a name that is no mesh axis": file(HEAD + '[rules]\nbatch = "dp*banana"\n'),
    "an unknown axis type": file('version = 1\naxis_types = "manual"\n'),
    "axis types as a word and as a table": lambda scene: (
        sw.Strategy(mesh={"dp": 2, "tp": 4}, axis_types="explicit")
        | sw.Strategy.load(scene.write('axis_types = {tp = "auto"}\n'))
    ),
    "a copy with an update": lambda scene: scene.strategy.model_copy(
        update={"rules": {"batch": 3}}
    ),
    "a newer format version": file("version = 2\n"),
    "a rule for an unknown axis": file(HEAD + '[rules]\nbacth = "dp"\n'),
    "a mesh axis spelled wrong": file(HEAD + '[rules]\nbatch = "dp+fdsp"\n'),
    "a rule without a candidate": file(HEAD + '[rules]\nbatch = "dp | "\n'),
    "an empty rule": file(HEAD + '[rules]\nbatch = ""\n'),
    "a candidate after replicated": file(HEAD + '[rules]\nbatch = "- | dp"\n'),
    "replicated inside a candidate": file(HEAD + '[rules]\nbatch = "dp+-"\n'),
    "one mesh axis twice": file(HEAD + '[rules]\nbatch = "dp+tp+dp"\n'),
    "a forbidden mesh axis name": file(HEAD + '[rules]\nbatch = "dp+dcn.dp"\n'),
    "a comma for a plus": file(HEAD + '[rules]\nbatch = "dp,tp"\n'),
    "an unconstrained parameter": file(HEAD + '[params]\nembed = "dp | ?"\n'),
    "one axis in two spellings": file(HEAD + '[rules]\nkv_head = "tp"\nKV_HEAD = "dp"\n'),
    "a declared axis that exists": file(HEAD + '[axes]\nbatch = "mine"\n'),
    "a declared axis with a space": file(HEAD + '[axes]\n"rotary dim" = "mine"\n'),
    "two sizes to infer": file("version = 1\n[mesh]\ndp = -1\ntp = -1\n"),
    "a size of zero": file("version = 1\n[mesh]\ndp = 0\n"),
    "slices that do not divide": file(HEAD + "[dcn]\ntp = 3\n"),
    "slices of a missing mesh axis": file(HEAD + "[dcn]\nfsdp = 2\n"),
    "an axis type of a missing mesh axis": file(
        'version = 1\naxis_types = {model = "explicit"}\n[mesh]\ndp = 2\n'
    ),
    "an unknown policy": file(HEAD + '[policy]\nindivisible = "ignore"\nconflct = "error"\n'),
    "several candidates to gather over": file(HEAD + '[policy]\ngather = "dp | tp"\n'),
    "gather over an unknown mesh axis": file(HEAD + '[policy]\ngather = "dp+ps"\n'),
    "an entry without a pattern": file(HEAD + '[[tensors]]\nembed = "-"\n'),
    "a bad pattern": file(HEAD + '[[tensors]]\nmatch = "lm_head/(.*"\nembed = "-"\n'),
    "a pattern without a rule": file(HEAD + '[[tensors]]\nmatch = "lm_head"\n'),
    "many problems at once": file(
        'version = 1\nnames = "x"\n[mesh]\ndp = 2\ntp = "4"\n[rules]\nbacth = "dp"\nhead = '
        '"tp |"\nembed = "dq"\n'
        '[[tensors]]\nmatch = "["\nembed = "-"\n'
    ),
    "an overlay that is compiled alone": compiled('version = 1\n[rules]\nrotary_dim = "columns"\n'),
    "an overlay with a bad mesh axis": lambda scene: (
        scene.strategy | sw.Strategy(mesh={"dp": 2, "tp": 4}) | sw.Strategy(rules={"batch": "data"})
    ),
    "bad values in Python": lambda scene: sw.Strategy(rules={"batch": None}, mesh={"dp": 2.0}),
}
