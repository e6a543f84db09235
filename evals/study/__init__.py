"""The study of read-copy formats: a grid of arms, controls that are no policies, and what came of them.

python -m quantize_state.evals.study MODEL --tokens 131072 --out DIR
"""
