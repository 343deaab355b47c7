"""For every lint: a strategy that it is about, and the nearest one that it is not about."""

from __future__ import annotations

import dataclasses
from typing import Any

import shardwright as sw
from shardwright.lints.catalogue import Code, Severity
from shardwright.trees.tensors import Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A strategy that a lint is about, and what it must say.

    `quiet` is the nearest strategy that it must not be about.
    """

    text: str
    code: Code
    severity: Severity
    where: str
    says: str
    fix: str
    tensors: Any = None
    mesh: Any = None
    quiet: str = ""
    quiet_mesh: Any = None


def weight(path: str, *axes: str, shape: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(path=path, axes=axes, shape=shape, role=sw.Role.PARAM)


def act(path: str, *axes: str, shape: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(path=path, axes=axes, shape=shape)


SERVING = '[params]\nembed = "fsdp"\n[modes.decode]\nbatch = "dp | -"\n[policy]\ngather = "fsdp"\n'
MOVING = '[params]\nvocab = "tp"\n[modes.decode.params]\nvocab = "tp+fsdp"\n'
DCN = '[mesh]\ndp = 4\nfsdp = 2\n[dcn]\ndp = 2\n[rules]\nbatch = "{}"\n'
WEIGHT = '[mesh]\ntp = {}\n[rules]\nembed = "tp"\nmlp_intermediate = "tp"\n'
STAGES = (
    '[mesh]\npp = {}\n[rules]\nbatch = "pp"\nlayers = "pp"\n[pipeline]\nschedule = "gpipe"\n'
    "microbatches = {}\n"
)
HEADS = '[rules]\nkv_head = "{}"\nkv_head_dim = "-"\nembed = "-"\n'

CASES: dict[str, Case] = {
    "an unknown axis": Case(
        text='[rules]\nbathc = "dp"\n',
        code=Code.UNKNOWN_AXIS,
        severity=Severity.ERROR,
        where="s.toml:2 rules.bathc",
        says="unknown axis 'bathc'",
        fix="did you mean 'batch'?",
        quiet='[rules]\nbatch = "dp"\n',
    ),
    "an unknown axis of a tensor": Case(
        text='[rules]\nbatch = "dp"\n',
        tensors=[act("acts/x", "BATHC")],
        code=Code.UNKNOWN_AXIS,
        severity=Severity.ERROR,
        where="acts/x dim 0 BATHC",
        says="unknown axis 'BATHC'",
        fix="did you mean 'BATCH'?",
    ),
    "an unknown mesh axis": Case(
        text='[rules]\nbatch = "dpp"\n',
        code=Code.UNKNOWN_MESH_AXIS,
        severity=Severity.ERROR,
        where="s.toml:2 rules.batch",
        says="mesh axis 'dpp' is neither in [mesh] nor a standard one",
        fix="did you mean",
    ),
    "a mesh axis for two axes of a layout": Case(
        text='[rules]\nquery_length = "tp"\nhead = "tp"\n',
        code=Code.SHARED_MESH_AXIS,
        severity=Severity.WARNING,
        where="s.toml:3 rules.head",
        says='head = "tp" fails in AttnQSharding: tp is taken by dim 1 QUERY_LENGTH',
        fix='end the rule in a fallback: "tp | -"',
        quiet='[rules]\nquery_length = "tp"\nhead = "tp | -"\n',
    ),
    "a mesh axis for two axes of a weight": Case(
        text=WEIGHT.format(-1),
        code=Code.SHARED_MESH_AXIS,
        severity=Severity.WARNING,
        where="s.toml:5 rules.mlp_intermediate",
        says="fails in ColumnWise, ExpertColumnWiseAlt, ExpertRowWiseAlt, RowWise: tp is taken by",
        fix="name another mesh axis",
        quiet=WEIGHT.format(1),
    ),
    "a mesh axis that another mesh lacks": Case(
        text='[mesh]\nmodel = 2\n[rules]\nbatch = "model"\n',
        mesh="dp:2",
        code=Code.UNKNOWN_MESH_AXIS,
        severity=Severity.ERROR,
        where="s.toml:4 rules.batch",
        says="names the mesh axis 'model', which the mesh (dp) does not have",
        fix="add model to the mesh",
        quiet='[mesh]\nmodel = 2\n[rules]\nbatch = "model"\n',
        quiet_mesh="model:4",
    ),
    "a gathered mesh axis that another mesh lacks": Case(
        text='[mesh]\nmodel = 2\n[rules]\nbatch = "dp"\n[policy]\ngather = "model"\n',
        mesh="dp:2",
        code=Code.UNKNOWN_MESH_AXIS,
        severity=Severity.ERROR,
        where="s.toml:6 policy.gather",
        says='"model" names the mesh axis',
        fix="add model to the mesh",
    ),
    "a tensor that does not fit": Case(
        text='[rules]\nbatch = "dp"\n',
        tensors=[act("a b", sw.BATCH, shape=(3,))],
        mesh="dp:2",
        code=Code.UNRESOLVED,
        severity=Severity.ERROR,
        where="a b dim 0 BATCH",
        says='size 3 does not divide over dp=2; rule batch = "dp" (s.toml:2, [rules])',
        fix='batch = "dp | -"',
        quiet='[rules]\nbatch = "dp | -"\n',
    ),
    "a tensor that does not fit in one mode": Case(
        text='[rules]\nbatch = "-"\n[modes.prefill]\nbatch = "dp"\n',
        tensors=[act("x", sw.BATCH, shape=(3,))],
        mesh={"dp": 2},
        code=Code.UNRESOLVED,
        severity=Severity.ERROR,
        where="x dim 0 BATCH",
        says="(in prefill)",
        fix="choose a size and a mesh that divide",
    ),
    "fewer heads than shards": Case(
        text=HEADS.format("tp"),
        tensors=[act("cache", sw.KV_HEAD, shape=(2,))],
        mesh="tp:4",
        code=Code.MORE_SHARDS_THAN_HEADS,
        severity=Severity.ERROR,
        where="cache dim 0 KV_HEAD",
        says="size 2 does not divide over tp=4",
        fix='kv_head = "tp | -"',
        quiet=HEADS.format("tp | -"),
    ),
    "fewer heads than shards, merged": Case(
        text=HEADS.format("tp"),
        tensors=[
            Tensor(
                path="k",
                axes=(sw.merged((sw.KV_HEAD, 2), (sw.KV_HEAD_DIM, 8)),),
                shape=(16,),
                role=sw.Role.PARAM,
            )
        ],
        mesh="tp:4",
        code=Code.MORE_SHARDS_THAN_HEADS,
        severity=Severity.ERROR,
        where="k dim 0 KV_HEAD*KV_HEAD_DIM",
        says="KV_HEAD of size 2 does not divide over tp=4",
        fix='kv_head = "tp | -"',
        quiet=HEADS.format("tp | -"),
    ),
    "fewer heads than shards, and a policy that does not say so": Case(
        text=HEADS.format("tp") + '[policy]\nindivisible = "replicate"\n',
        tensors=[act("cache", sw.KV_HEAD, shape=(2,))],
        mesh="tp:4",
        code=Code.MORE_SHARDS_THAN_HEADS,
        severity=Severity.WARNING,
        where="cache dim 0 KV_HEAD",
        says="2 heads for 4 shards",
        fix='if intended, write kv_head = "tp | -"',
        quiet=HEADS.format("tp | -") + '[policy]\nindivisible = "replicate"\n',
    ),
    "heads that are cut": Case(
        text=HEADS.format("tp | -"),
        tensors=[
            act("cache", sw.KV_HEAD, sw.KV_HEAD_DIM, shape=(2, 128)),
            weight("k", sw.EMBED, sw.KV_HEAD, shape=(512, 256)),
        ],
        mesh="tp:4",
        code=Code.MORE_SHARDS_THAN_HEADS,
        severity=Severity.WARNING,
        where="k dim 1 KV_HEAD",
        says="size 256 is 2 flattened heads over 4 shards, which splits heads",
        fix="annotate the flat dim as merged((KV_HEAD, 2), (KV_HEAD_DIM, 128))",
        quiet=HEADS.format("tp | -"),
        quiet_mesh="tp:2",
    ),
    "a candidate written twice": Case(
        text='[rules]\nbatch = "dp+fsdp | fsdp+dp"\n',
        code=Code.UNREACHABLE_CANDIDATE,
        severity=Severity.WARNING,
        where="s.toml:2 rules.batch",
        says="the candidate fsdp+dp is never used: whenever it fits, the earlier dp+fsdp fits too",
        fix="drop one of dp+fsdp and fsdp+dp",
        quiet='[rules]\nbatch = "dp+fsdp | dp"\n',
    ),
    "a candidate behind a part of it": Case(
        text='[mesh]\ndp = 2\nfsdp = 4\n[rules]\nbatch = "dp | dp+fsdp | -"\n',
        code=Code.UNREACHABLE_CANDIDATE,
        severity=Severity.WARNING,
        where="s.toml:5 rules.batch",
        says="the candidate dp+fsdp is never used",
        fix='write the longer one first, "dp+fsdp | dp"',
        quiet='[mesh]\ndp = 1\nfsdp = 4\n[rules]\nbatch = "dp | dp+fsdp | -"\n',
    ),
    "a candidate of optimizer state behind a part of it": Case(
        text='[mesh]\ndp = 2\nfsdp = 4\n[rules]\nbatch = "dp+fsdp"\n[policy]\n'
        'zero1 = "dp | dp+fsdp"\n',
        code=Code.UNREACHABLE_CANDIDATE,
        severity=Severity.WARNING,
        where="s.toml:7 policy.zero1",
        says="the candidate dp+fsdp is never used",
        fix='"dp+fsdp | dp"',
        quiet='[mesh]\ndp = 2\nfsdp = 4\n[rules]\nbatch = "dp+fsdp"\n[policy]\n'
        'zero1 = "dp+fsdp | dp"\n',
    ),
    "a rule that every mode replaces": Case(
        text='[rules]\nbatch = "dp"\n[modes.train]\nbatch = "-"\n[modes.prefill]\nbatch = "sp"\n'
        '[modes.decode]\nbatch = "tp"\n',
        code=Code.SHADOWED_RULE,
        severity=Severity.WARNING,
        where="s.toml:2 rules.batch",
        says='batch = "dp" is never used',
        fix="drop it",
        quiet='[rules]\nbatch = "dp"\n[modes.train]\nbatch = "-"\n[modes.insert]\nbatch = "sp"\n'
        '[modes.decode]\nbatch = "tp"\n',
    ),
    "a rule of parameters that every mode replaces": Case(
        text='[params]\nvocab = "-"\n[modes.train.params]\nvocab = "dp"\n[modes.prefill.params]\n'
        'vocab = "tp"\n'
        '[modes.decode.params]\nvocab = "tp"\n',
        code=Code.SHADOWED_RULE,
        severity=Severity.WARNING,
        where="s.toml:2 params.vocab",
        says='vocab = "-" is never used',
        fix="under [modes.M.params]",
        quiet='[params]\nvocab = "-"\n[modes.prefill.params]\nvocab = "tp"\n'
        '[modes.decode.params]\nvocab = "tp"\n',
    ),
    "a pattern twice": Case(
        text='[[tensors]]\nmatch = "a"\nembed = "-"\n[[tensors]]\nmatch = "a"\nembed = "dp"\n'
        'vocab = "tp"\n',
        code=Code.SHADOWED_TENSORS,
        severity=Severity.WARNING,
        where="s.toml:6 tensors.1.embed",
        says="embed of match 'a' is never used: the earlier match 'a' (s.toml:1) decides first",
        fix="drop this rule",
        quiet='[[tensors]]\nmatch = "a"\nembed = "-"\n[[tensors]]\nmatch = "a"\nvocab = "tp"\n',
    ),
    "a pattern behind a wider one": Case(
        text='[[tensors]]\nmatch = "lm"\nembed = "-"\n[[tensors]]\nmatch = "lm_head"\n'
        'embed = "dp"\n',
        tensors=[weight("lm_head/kernel", sw.EMBED)],
        code=Code.SHADOWED_TENSORS,
        severity=Severity.WARNING,
        where="s.toml:6 tensors.1.embed",
        says="the earlier match 'lm' (s.toml:1) decides first",
        fix="put the narrower pattern first",
        quiet='[[tensors]]\nmatch = "lm_head"\nembed = "dp"\n[[tensors]]\nmatch = "lm"\n'
        'vocab = "-"\n[rules]\nvocab = "-"\n',
    ),
    "a mode that says nothing new": Case(
        text='[rules]\nbatch = "dp"\n[modes.decode]\nbatch = "dp"\n',
        code=Code.MODE_CHANGES_NOTHING,
        severity=Severity.WARNING,
        where="s.toml:3 modes.decode",
        says="[modes.decode] changes nothing: the same rules hold without it",
        fix="drop the table",
        quiet='[rules]\nbatch = "dp"\n[modes.decode]\nbatch = "-"\n',
    ),
    "a mode that says nothing": Case(
        text='[rules]\nbatch = "dp"\n[modes.train]\n',
        code=Code.MODE_CHANGES_NOTHING,
        severity=Severity.WARNING,
        where="s.toml:3 modes.train",
        says="[modes.train] is empty",
        fix="drop the table",
    ),
    "insert that repeats decode": Case(
        text='[rules]\nbatch = "dp"\n[modes.decode]\nbatch = "-"\n[modes.insert]\nbatch = "-"\n',
        code=Code.MODE_CHANGES_NOTHING,
        severity=Severity.WARNING,
        where="s.toml:5 modes.insert",
        says="[modes.insert] changes nothing: the same rules hold without it",
        fix="drop the table",
        quiet='[rules]\nbatch = "dp"\n[modes.decode]\nbatch = "-"\n[modes.insert]\nbatch = "dp"\n',
    ),
    "a line of a mode that says nothing new": Case(
        text='[rules]\nbatch = "dp"\n[modes.decode]\nbatch = "dp"\nhead = "tp"\n',
        code=Code.MODE_CHANGES_NOTHING,
        severity=Severity.NOTE,
        where="s.toml:4 modes.decode.batch",
        says='batch = "dp" changes nothing: the same rule holds without this line',
        fix="drop the line",
        quiet='[rules]\nbatch = "dp"\n[modes.decode]\nbatch = "-"\nhead = "tp"\n',
    ),
    "weights that move": Case(
        text=MOVING,
        code=Code.WEIGHTS_MOVE,
        severity=Severity.WARNING,
        where="s.toml:4 modes.decode.params.vocab",
        says='weights with VOCAB are sharded differently in prefill ("tp") and in decode '
        '("tp+fsdp")',
        fix="give these weights one rule, under [params]",
        quiet='[params]\nvocab = "tp"\n[modes.train.params]\nvocab = "tp+fsdp"\n',
    ),
    "weights that move on this mesh": Case(
        text=MOVING,
        tensors=[weight("head", sw.VOCAB, shape=(8,))],
        mesh="fsdp:2,tp:2",
        code=Code.WEIGHTS_MOVE,
        severity=Severity.WARNING,
        where="s.toml:4 modes.decode.params.vocab",
        says="are sharded differently in prefill",
        fix="each mode in its own process",
        quiet=MOVING,
        quiet_mesh="dp:1,tp:4",
    ),
    "weights gathered for every token": Case(
        text=SERVING,
        code=Code.GATHERED_IN_DECODE,
        severity=Severity.WARNING,
        where="s.toml:6 policy.gather",
        says="in decode, weights with EMBED are gathered over fsdp for every token",
        fix="as in the preset serve_tp",
        quiet=SERVING.replace('gather = "fsdp"', 'gather = "-"'),
    ),
    "weights gathered for every token, of the tree": Case(
        text=SERVING,
        tensors=[weight("w", sw.EMBED, shape=(8,))],
        mesh="dp:2,fsdp:2",
        code=Code.GATHERED_IN_DECODE,
        severity=Severity.WARNING,
        where="s.toml:6 policy.gather",
        says="weights with EMBED are gathered over fsdp",
        fix='gather = "-"',
        quiet=SERVING,
        quiet_mesh="dp:2,fsdp:1",
    ),
    "a slow network inside": Case(
        text=DCN.format("fsdp+dp"),
        code=Code.DCN_MINOR,
        severity=Severity.WARNING,
        where="s.toml:7 rules.batch",
        says='in "fsdp+dp", dp crosses slices but comes after fsdp, which does not cross them',
        fix='write the crossing axis first: "dp+fsdp"',
        quiet=DCN.format("dp+fsdp"),
    ),
    "microbatches that do not divide over pp": Case(
        text=STAGES.format(4, 6),
        code=Code.UNEVEN_MICROBATCHES,
        severity=Severity.ERROR,
        where="s.toml:8 pipeline.microbatches",
        says="6 microbatches do not divide over pp=4",
        fix="microbatches = 8",
        quiet=STAGES.format(4, 8),
    ),
    "microbatches on another mesh": Case(
        text=STAGES.format(2, 6),
        mesh="pp:4,dp:2",
        code=Code.UNEVEN_MICROBATCHES,
        severity=Severity.ERROR,
        where="s.toml:8 pipeline.microbatches",
        says="6 microbatches do not divide over pp=4",
        fix="microbatches = 8",
        quiet=STAGES.format(2, 6),
        quiet_mesh="pp:3,dp:2",
    ),
    "weights over a mesh axis of the batch": Case(
        text='[rules]\nbatch = "dp+fsdp"\n[params]\nembed = "fsdp+sp | dp | -"\n',
        code=Code.NOT_GATHERED,
        severity=Severity.WARNING,
        where="s.toml:4 params.embed",
        says="weights with EMBED are stored over fsdp+dp, which also shards BATCH of activations",
        fix='gather the weights for use, [policy] gather = "fsdp+dp"',
        quiet='[rules]\nbatch = "dp"\nhead = "tp"\n[params]\nembed = "tp"\nlayers = "dp"\n',
    ),
    "weights over a mesh axis that is not gathered": Case(
        text='[rules]\nbatch = "fsdp"\nlength = "sp"\n[params]\nembed = "fsdp+sp"\n'
        '[policy]\ngather = "fsdp"\n',
        tensors=[weight("w", sw.EMBED, shape=(8,)), act("x", sw.BATCH, shape=(8,))],
        mesh="fsdp:2,sp:2",
        code=Code.NOT_GATHERED,
        severity=Severity.WARNING,
        where="s.toml:5 params.embed",
        says="weights with EMBED are stored over sp, which also shards LENGTH of activations",
        fix='gather the weights for use, [policy] gather = "fsdp+sp"',
        quiet='[rules]\nbatch = "fsdp"\nlength = "sp"\n[params]\nembed = "fsdp+sp"\n'
        '[policy]\ngather = "fsdp"\n',
        quiet_mesh="fsdp:4,sp:1",
    ),
    "weights of a mode over a mesh axis of the batch": Case(
        text='[rules]\nbatch = "dp"\n[modes.train.params]\nvocab = "dp"\n',
        code=Code.NOT_GATHERED,
        severity=Severity.WARNING,
        where="s.toml:4 modes.train.params.vocab",
        says="weights with VOCAB are stored over dp, which also shards BATCH of activations",
        fix="or store them over another mesh axis",
        quiet='[rules]\nbatch = "dp"\n[modes.decode.params]\nvocab = "dp"\n',
    ),
    "a largest dim over a mesh axis of the batch": Case(
        text='[rules]\nbatch = "fsdp"\n[policy]\nlargest_dim = "fsdp | -"\n',
        code=Code.NOT_GATHERED,
        severity=Severity.WARNING,
        where="s.toml:4 policy.largest_dim",
        says="weights are stored over fsdp, which also shards BATCH of activations",
        fix='[policy] gather = "fsdp"',
        quiet='[rules]\nbatch = "fsdp"\n[policy]\nlargest_dim = "fsdp | -"\ngather = "fsdp"\n',
    ),
    "a slow network inside an annotation": Case(
        text='[rules]\nbatch = "-"\n',
        tensors={"x": ((sw.FSDP, sw.DP),)},
        mesh="dcn.dp:2,dp:4,fsdp:2",
        code=Code.DCN_MINOR,
        severity=Severity.WARNING,
        where="x dim 0 FSDP+DP",
        says="in the annotation, dp crosses slices but comes after fsdp",
        fix="first in the composite",
        quiet='[rules]\nbatch = "-"\n',
        quiet_mesh="dcn.fsdp:2,dp:4,fsdp:2",
    ),
    "a mesh axis of one's own that no rule names": Case(
        text='[mesh]\nrow = 4\n[rules]\nbatch = "dp"\n',
        code=Code.IDLE_MESH_AXIS,
        severity=Severity.ERROR,
        where="s.toml:2 mesh.row",
        says="row=4 shards nothing: no rule names it, so groups of 4 devices do the same work",
        fix='use row in a rule, such as batch = "row"',
        quiet='[mesh]\nrow = 4\n[rules]\nbatch = "row"\n',
    ),
    "a typing error in the mesh": Case(
        text='[mesh]\nfdsp = 4\n[rules]\nbatch = "dp+fsdp"\n',
        code=Code.IDLE_MESH_AXIS,
        severity=Severity.ERROR,
        where="s.toml:2 mesh.fdsp",
        says="fdsp=4 shards nothing: no rule names it",
        fix="did you mean 'fsdp'? Rules name that mesh axis, and the mesh does not have it. "
        "Otherwise use fdsp in",
        quiet='[mesh]\nfdsp = 4\n[rules]\nbatch = "dp"\n[policy]\nidle = "fdsp"\n',
    ),
    "a typing error in the mesh and in the rules": Case(
        text='[mesh]\ndp = 2\nfdsp = 4\n[rules]\nbatch = "dp+fdsp"\n',
        code=Code.UNKNOWN_MESH_AXIS,
        severity=Severity.NOTE,
        where="s.toml:3 mesh.fdsp",
        says="fdsp is not a standard mesh axis, and the mesh has no fsdp: FSDP in an annotation is",
        fix="did you mean 'fsdp'?",
        quiet="[mesh]\nfdsp = 2\nfsdp = 2\nps = 2\nhsdp = 2\n"
        '[rules]\nbatch = "fdsp+fsdp+ps+hsdp"\n',
    ),
    "a standard mesh axis that no rule names": Case(
        text='[mesh]\ndp = 2\ntp = 4\n[rules]\nbatch = "dp"\n',
        code=Code.IDLE_MESH_AXIS,
        severity=Severity.NOTE,
        where="s.toml:3 mesh.tp",
        says="tp=4 is in no rule: only dims that are annotated TP are sharded over it",
        fix='use tp in a rule, such as batch = "tp"',
        quiet='[mesh]\ndp = 2\ntp = 1\nsp = 2\n[rules]\nbatch = "dp"\nsequence_parallel = "-"\n',
    ),
    "a standard mesh axis of a mesh for the check": Case(
        text='[mesh]\ntp = 4\n[rules]\nbatch = "dp"\n',
        code=Code.IDLE_MESH_AXIS,
        severity=Severity.NOTE,
        where="s.toml:2 mesh.tp",
        says="tp=4 is in no rule",
        fix="use tp in a rule",
        quiet='[rules]\nbatch = "dp"\n',
        quiet_mesh="dp:2,tp:4",
    ),
    "a mesh axis whose meaning went elsewhere": Case(
        text='[mesh]\nmodel = 4\ntp = -1\n[rules]\ntensor_parallel = "model"\n',
        code=Code.IDLE_MESH_AXIS,
        severity=Severity.WARNING,
        where="s.toml:3 mesh.tp",
        says="tp shards nothing: no rule names it, and tensor_parallel means another mesh axis, "
        "so all its devices do the same work",
        fix="give its devices to another mesh axis",
        quiet='[mesh]\ntp = -1\n[rules]\ntensor_parallel = "-"\n',
    ),
    "a mesh axis without tensors": Case(
        text='[rules]\nbatch = "dp"\n',
        tensors=[act("x", sw.BATCH), weight("w", sw.BATCH)],
        mesh="dp:2,tp:4",
        code=Code.IDLE_MESH_AXIS,
        severity=Severity.WARNING,
        where="mesh axis tp",
        says="tp=4 shards nothing: no tensor of the tree is sharded over it in any mode",
        fix="use tp in a rule",
        quiet='[rules]\nbatch = "dp+tp"\n',
    ),
    "a zero1 whose mesh axes every weight has": Case(
        text='[params]\nembed = "fsdp"\nmlp_intermediate = "tp"\n[policy]\nzero1 = "fsdp | tp"\n',
        tensors=[
            act("x", sw.BATCH),
            weight("up", sw.EMBED, sw.MLP_INTERMEDIATE, shape=(16, 32)),
            weight("norm", sw.EMPTY, shape=(16,)),
        ],
        mesh="dp:2,fsdp:2,tp:2",
        code=Code.IDLE_ZERO1,
        severity=Severity.WARNING,
        where="s.toml:5 policy.zero1",
        says='zero1 = "fsdp | tp" shards nothing: for every weight of the tree, the parameter is '
        "already sharded over fsdp; "
        "the parameter is already sharded over tp",
        fix='name a mesh axis that parameters do not use, such as zero1 = "dp | -"',
        quiet='[params]\nembed = "fsdp"\nmlp_intermediate = "tp"\n[policy]\nzero1 = "fsdp | dp"\n',
    ),
    "a zero1 over mesh axes that are not there": Case(
        text='[mesh]\nfsdp = 4\n[rules]\nbatch = "fsdp"\n[policy]\nzero1 = "dp | -"\n',
        code=Code.IDLE_ZERO1,
        severity=Severity.NOTE,
        where="s.toml:6 policy.zero1",
        says='zero1 = "dp | -" shards nothing: the mesh has no axis of more than one device among '
        "dp",
        fix="or drop the line",
        quiet='[mesh]\nfsdp = 4\ndp = -1\n[rules]\nbatch = "fsdp"\n[policy]\nzero1 = "dp | -"\n',
    ),
    "a largest_dim with a minimum that no weight reaches": Case(
        text='[rules]\nembed = "-"\n[policy]\nlargest_dim = "fsdp | -"\n'
        'largest_dim_min_size = 9999\ngather = "fsdp"\n',
        tensors=[
            act("x", sw.BATCH),
            *(weight(f"w{size}", sw.EMBED, shape=(size,)) for size in (16, 64, 32)),
        ],
        mesh="dp:2,fsdp:2",
        code=Code.IDLE_LARGEST_DIM,
        severity=Severity.WARNING,
        where="s.toml:4 policy.largest_dim",
        says="for every weight of the tree, 64 elements are fewer than largest_dim_min_size = "
        "9999; 32 elements are fewer than largest_dim_min_size = 9999; and 1 more like these",
        fix="lower largest_dim_min_size",
        quiet='[rules]\nembed = "-"\n[policy]\nlargest_dim = "fsdp | -"\n'
        'largest_dim_min_size = 64\ngather = "fsdp"\n',
    ),
    "a largest_dim over mesh axes that are not there": Case(
        text='[mesh]\ndp = 4\n[rules]\nbatch = "dp"\n[policy]\nlargest_dim = "fsdp | -"\n',
        code=Code.IDLE_LARGEST_DIM,
        severity=Severity.NOTE,
        where="s.toml:6 policy.largest_dim",
        says="the mesh has no axis of more than one device among fsdp",
        fix="or drop the line",
        quiet='[mesh]\ndp = 4\nfsdp = -1\n[rules]\nbatch = "dp"\n[policy]\n'
        'largest_dim = "fsdp | -"\n',
    ),
    "an axis without a rule": Case(
        text='[axes]\nrotary = "x"\n[rules]\nbatch = "dp"\n',
        tensors=[act("q", sw.BATCH, "rotary"), act("k", "rotary")],
        code=Code.NO_RULE,
        severity=Severity.WARNING,
        where="s.toml:3 rules",
        says="ROTARY of q, k has no rule: replicated",
        fix='[rules] rotary = "-"',
        quiet='[axes]\nrotary = "x"\n[rules]\nbatch = "dp"\nrotary = "-"\n',
    ),
    "an axis of a composite without a rule": Case(
        text='[axes]\nrotary = "x"\n[rules]\nbatch = "dp"\n',
        tensors=[Tensor(path="q", axes=((sw.BATCH, "rotary"),))],
        code=Code.NO_RULE,
        severity=Severity.WARNING,
        where="s.toml:3 rules",
        says="ROTARY of q has no rule: replicated",
        fix='[rules] rotary = "-"',
        quiet='[axes]\nrotary = "x"\n[rules]\nbatch = "dp"\nrotary = "-"\n',
    ),
    "a composite that does not divide": Case(
        text='[rules]\nbatch = "dp"\nlength = "sp"\n',
        tensors=[Tensor(path="x", axes=((sw.BATCH, sw.LENGTH),), shape=(6,))],
        mesh="dp:2,sp:2",
        code=Code.UNRESOLVED,
        severity=Severity.ERROR,
        where="x dim 0 BATCH+LENGTH",
        says="size 6 does not divide over dp=2, sp=2 (4 shards); "
        'rule batch = "dp" (s.toml:2, [rules]) and length = "sp" (s.toml:3, [rules])',
        fix='length = "sp | -"',
        quiet='[rules]\nbatch = "dp"\nlength = "sp | -"\n',
    ),
    "an axis without a rule in some modes": Case(
        text='[axes]\nrotary = "x"\n[modes.decode]\nrotary = "-"\n',
        tensors=[act("q", "rotary")],
        code=Code.NO_RULE,
        severity=Severity.WARNING,
        where="s.toml rules",
        says="ROTARY of q has no rule: replicated (in train, prefill)",
        fix='[rules] rotary = "-"',
    ),
    "a pattern that matches nothing": Case(
        text='[rules]\nembed = "-"\n[[tensors]]\nmatch = "lm_haed"\nembed = "dp"\n',
        tensors=[weight("lm_head/kernel", sw.EMBED)],
        code=Code.UNUSED_TENSORS,
        severity=Severity.WARNING,
        where="s.toml:4 tensors.0.match",
        says="match 'lm_haed' matches no weight of the tree",
        fix="the tree has the path lm_head/kernel",
        quiet='[rules]\nembed = "-"\n[[tensors]]\nmatch = "lm_head"\nembed = "dp"\n',
    ),
    "a pattern whose weights lack the axis": Case(
        text='[rules]\nembed = "-"\n[[tensors]]\nmatch = "lm_head"\nvocab = "dp"\n',
        tensors=[weight("lm_head/kernel", sw.EMBED)],
        code=Code.UNUSED_TENSORS,
        severity=Severity.WARNING,
        where="s.toml:5 tensors.0.vocab",
        says="match 'lm_head' matches no weight with the axis VOCAB",
        fix="drop the rule",
    ),
    "a rule that the tree does not use": Case(
        text='[rules]\nbatch = "dp"\nhead = "tp"\nembed = "-"\npage = "-"\n',
        tensors=[act("x", sw.BATCH), weight("w", sw.EMBED)],
        code=Code.UNUSED_RULE,
        severity=Severity.NOTE,
        where="s.toml:3 rules.head",
        says='head = "tp" is not used: no tensor of the tree has the axis HEAD',
        fix="leave it for other models",
        quiet='[rules]\nbatch = "dp"\nembed = "-"\npage = "-"\n',
    ),
    "an axis that the tree does not use": Case(
        text='[axes]\nrotary = "x"\n[rules]\nbatch = "dp"\nembed = "-"\n',
        tensors=[act("x", sw.BATCH), weight("w", sw.EMBED)],
        code=Code.UNUSED_RULE,
        severity=Severity.NOTE,
        where="s.toml:2 axes.rotary",
        says="no tensor of the tree has the axis ROTARY",
        fix="drop the line",
    ),
}
