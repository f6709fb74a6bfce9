"""Every architecture on MovieLens 100K in its file's order: 3 seeds, beside the floors."""

from bench.recsys.models import score_split

if __name__ == "__main__":
    score_split("file order")
