"""Question sets: what a low-precision state does to a model's answers, through lm-eval, paired and with intervals."""
