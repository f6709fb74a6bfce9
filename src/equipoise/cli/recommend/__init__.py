"""What verbs over a run print where that is a recommender: pack, plan, simulate, calibrate."""
