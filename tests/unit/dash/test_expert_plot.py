"""Pictures of experts: bars are the rows that ranks compute, the same bytes each time."""

from pathlib import Path

from equipoise.balance.expert.compare import ExpertSetting, compare_experts, policy_names
from equipoise.dash.expert.plot import own_and_copied, plot_experts


def test_bars_are_rows_and_pictures_repeat(tmp_path: Path) -> None:
    setting = ExpertSetting("W1", 0, 1, 4, 16, 1, 1, 1000)
    request = setting.request()
    scores = compare_experts(request, policy_names(request))
    for score in scores:
        own, copied = own_and_copied(score.schedule)
        assert (own + copied).tolist() == score.schedule.computed.tolist()
        assert (copied.sum() > 0) == (score.schedule.copies > 0)
    files = [tmp_path / f"{name}.svg" for name in ("one", "two")]
    for file in files:
        plot_experts(file, scores, "a title")
    assert files[0].read_bytes() == files[1].read_bytes()
