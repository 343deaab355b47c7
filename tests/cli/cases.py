"""Command lines with a golden output, and how to run one."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
from pathlib import Path

from shardwright.cli.main import main

MESH = "--mesh dp:1,fsdp:2,sp:2,tp:2"

CASES: dict[str, str] = {
    "activation": "BATCH QUERY_LENGTH EMBED --strategy fsdp_tp --mesh dp:1,fsdp:2,tp:4 --shape "
    "16,4096,4096",
    "strategy_mesh": "BATCH --strategy ddp --devices 8 --mode train",
    "weight_as_used": f"EMBED MLP_INTERMEDIATE --role use --strategy fsdp_tp {MESH} --mode train "
    f"--shape 4096,14336",
    "layout": f"ColumnWise --strategy fsdp_tp {MESH} --mode prefill",
    "bias": f"ColumnWise.bias --strategy fsdp_tp {MESH} --mode train --shape 14336",
    "stacked": f"stacked(RowWise) --strategy fsdp_tp {MESH} --mode train --shape 32,14336,4096",
    "composite": f"DP+FSDP _ --strategy fsdp_tp {MESH} --mode train --shape 16,3",
    "composite_chains": "BATCH+QUERY_LENGTH EMBED --strategy serve_tp --mesh dp:2,ep:2,tp:2 "
    "--shape 6,4096",
    "composite_refused": "EMBED HEAD+HEAD_DIM --strategy fsdp_tp --mesh tp:4 --shape 64,768 "
    "--mode train",
    "composite_json": "BATCH+QUERY_LENGTH EMBED --strategy serve_tp --mesh dp:2,tp:4 --shape 3,8 "
    "--mode decode --json",
    "merged": f"EMBED KV_HEAD:3*KV_HEAD_DIM:128 --role param --strategy fsdp_tp {MESH} --mode "
    f"insert --shape 4096,384",
    "scalar": f"() --strategy fsdp_tp {MESH}",
    "path": "EMBED VOCAB --role param --path lm_head/kernel --strategy 'fsdp_tp | "
    "head.toml' --mesh fsdp:2,tp:2 --shape 64,256",
    "indivisible": "BATCH HEAD --strategy fsdp_tp --mesh tp:4 --shape 3,6",
    "conflict": "BATCH EXPERT --strategy moe_ep --mesh fsdp:2,ep:2 --shape 8,8 --mode train",
    "no_shape": "BATCH KV_HEAD --strategy fsdp_tp --mesh fsdp:2,tp:4",
    "unknown_axis": "BATHC --strategy fsdp_tp --mesh fsdp:2,tp:4 --mode decode",
    "rank": "BATCH EMBED --strategy fsdp_tp --mesh dp:2 --shape 4",
    "long_context": "BATCH KV_LENGTH KV_HEAD KV_HEAD_DIM --strategy serve_long_context --mesh "
    "dp:2,sp:2,tp:2 --shape 1,8192,8,128",
    "tree": f"--tensors tensors.toml --strategy fsdp_tp {MESH}",
    "tree_one_mode": f"--tensors tensors.toml --strategy serve_tp {MESH} --mode decode",
    "tree_problems": "--tensors tensors.toml --strategy fsdp_tp --mesh fsdp:3,tp:3",
    "json": "BATCH KV_HEAD --strategy serve_tp --mesh dp:2,tp:4 --shape 1,8 --mode decode --json",
    "tree_json": f"--tensors tensors.json --strategy fsdp_tp {MESH} --mode train --json",
    "narrow": "BATCH QUERY_LENGTH --strategy fsdp_tp --mesh dp:1,fsdp:2,tp:4 --shape 16,4096 "
    "--mode train --width 80",
}

# The other commands; the whole line.
OTHERS: dict[str, str] = {
    "check_clean": "check fsdp_tp serve_tp",
    "check_file": "check odd.toml",
    "check_tree": "check odd.toml --tensors tensors.toml --mesh dp:4,fsdp:2,tp:3",
    "check_broken": "check broken.toml",
    "check_strict": "check odd.toml --strict --width 80",
    "check_json": "check narrow.toml --json",
    "check_overlay": 'check "fsdp_tp | head.toml" --devices 32',
    "diff": "diff fsdp fsdp_tp --tensors tensors.toml --mesh fsdp:2,tp:2",
    "diff_exit_code": "diff fsdp fsdp_tp --tensors tensors.toml --mesh fsdp:2,tp:2 --exit-code "
    "--width 80",
    "diff_meshes": "diff fsdp_tp --tensors tensors.toml --mesh fsdp:2,tp:4 --mesh fsdp:4,tp:2 "
    "--mode train",
    "diff_modes": f"diff fsdp_tp --tensors tensors.toml {MESH} --mode train --mode decode",
    "diff_json": "diff ddp fsdp --tensors tensors.json --mesh fsdp:2 --mode train --json",
    "diff_problems": "diff ddp fsdp_tp --tensors tensors.toml --mesh tp:3",
    "diff_nothing": "diff fsdp_tp serve_tp --tensors tensors.json --mesh tp:2 --exit-code",
    "presets_list": "presets list",
    "presets_list_narrow": "presets list --width 80",
    "presets_show": "presets show single",
    "presets_copy": "presets copy ddp mine.toml",
}

FILES: dict[str, str] = {
    "odd.toml": """\
version = 1

[mesh]
dp = 4
fsdp = 2
tp = 2

[dcn]
dp = 2

[rules]
batch = "fsdp+dp"
embed = "-"
head = "tp | tp"
kv_head = "tp | -"
mlp_intermediate = "tp"
vocab = "tp"

[modes.decode]
batch = "fsdp+dp"
""",
    "broken.toml": '[rules]\nbatch = "dp |"\nhead = "dpp"\n[params]\nbatchs = "-"\n',
    "narrow.toml": '[rules]\nbatch = "dp | dp"\n',
    "head.toml": '[[tensors]]\nmatch = "lm_head/.*"\nembed = "-"\nvocab = "fsdp+tp"\n',
    "tensors.toml": """\
dtype = "bfloat16"

[params]
role = "param"

[params.embed]
axes = "VOCAB EMBED"
shape = [128256, 4096]

[params.blocks.q]
axes = ["EMBED", "HEAD", "HEAD_DIM"]
shape = [4096, 32, 128]

[params.blocks.k]
axes = "EMBED KV_HEAD:8*KV_HEAD_DIM:128"
shape = [4096, 1024]

[params.blocks.up]
axes = "ColumnWise"
shape = [4096, 14336]

[params.blocks.norm]
axes = "NORM"
shape = [4096]
dtype = "float32"

[acts.q]
axes = "BATCH QUERY_LENGTH HEAD HEAD_DIM"
shape = [16, 4096, 32, 128]

[acts.scores]
axes = "BATCH HEAD QUERY_LENGTH BIAS_KV_SEQ"
shape = [16, 32, 4096, 4096]
""",
    "tensors.json": """\
{"wi": {"axes": "EMBED MLP_INTERMEDIATE", "shape": [64, 256], "role": "param", \
"dtype": "float32"}, "step": {"axes": "()", "shape": []}}
""",
}


def run(line: str, folder: Path) -> tuple[int, str, str]:
    """Run `shardwright <line>` in a folder that has FILES; return exit code, stdout and stderr."""
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    out, err = io.StringIO(), io.StringIO()
    before = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(shlex.split(line))
    finally:
        os.chdir(before)
    return code, out.getvalue(), err.getvalue()


def shown(line: str, folder: Path) -> str:
    """What a golden file holds: the command, its output and its exit code."""
    command = (
        line
        if line in OTHERS.values()
        else "explain "
        + line.replace("stacked(RowWise)", "'stacked(RowWise)'").replace("() ", "'()' ")
    )
    code, out, err = run(command, folder)
    return f"$ shardwright {command}\n{out}{err}exit {code}\n"
