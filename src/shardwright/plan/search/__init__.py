"""Search meshes and rules of a program on a slice: the space, the ranking, and the result.

Code that creates, ranks or compares candidates belongs here. `plan.planner` computes what one
candidate costs.
"""

from shardwright.plan.search.result import Candidate as Candidate
from shardwright.plan.search.result import SearchReport as SearchReport
from shardwright.plan.search.run import search as search
from shardwright.plan.search.run import search_variants as search_variants
from shardwright.plan.search.verify import VerifiedCandidate as VerifiedCandidate
from shardwright.plan.search.verify import verify_front as verify_front
