"""The map of the course: every chapter that is planned, in its group, and which of them are here."""

from dataclasses import dataclass

from deepseek_lab.learn.progress import load
from deepseek_lab.learn.verdict import OPEN, PASSED
from deepseek_lab.learn.widgets import Html


@dataclass(frozen=True)
class Entry:
    """A chapter on the map: its file name without the ending, and what one builds in it."""

    name: str
    builds: str

    @property
    def title(self) -> str:
        words = self.name[3:].replace("_", " ")
        return ACRONYMS.get(words, words)


ACRONYMS = {"zero": "ZeRO", "moe": "MoE", "mtp": "MTP", "sft": "SFT", "ppo": "PPO", "grpo": "GRPO"}

COURSE: dict[str, tuple[Entry, ...]] = {
    "Start": (
        Entry("00_start_here", "one mean over four ranks"),
        Entry("01_one_rank", "a language model on one rank"),
        Entry("02_collectives", "all-reduce from sends and receives"),
    ),
    "Parallel": (
        Entry("03_data_parallel", "gradient buckets, overlap, compression"),
        Entry("04_tensor_parallel", "matrices split over ranks"),
        Entry("05_zero", "optimizer, gradients, weights sharded"),
        Entry("06_pipeline", "stages and their schedules"),
        Entry("07_moe", "experts and their router"),
        Entry("08_expert_parallel", "tokens sent to experts"),
        Entry("09_compose", "all of it at once, same numbers"),
    ),
    "Architecture": (
        Entry("10_attention", "windows, latent attention, its cache"),
        Entry("11_mtp", "several tokens predicted at once"),
    ),
    "Numbers and control": (
        Entry("12_mixed_precision", "BF16, FP16, FP8"),
        Entry("13_control", "clipping, batch size, a learned controller"),
    ),
    "Data": (
        Entry("14_cleaning", "duplicates, quality, languages"),
        Entry("15_mixing", "topics, masking, back-translation"),
    ),
    "Alignment": (
        Entry("16_sft", "from pages to answers"),
        Entry("17_reward_model", "which answer is better"),
        Entry("18_ppo", "a policy that seeks reward"),
        Entry("19_grpo", "the same without a critic"),
    ),
    "Operate": (
        Entry("20_hardware", "links, trees, tori, a planner"),
        Entry("21_checkpoints", "sharded, asynchronous, resharded"),
        Entry("22_elastic", "lose a rank, carry on"),
        Entry("23_monitoring", "what to watch, when to wake somebody"),
        Entry("24_capstone", "pretrain to PPO, on your own code"),
    ),
}


def course_map() -> Html:
    """All chapters by group: a bar shows how much of a chapter you have passed; dashed ones are not written yet."""
    from deepseek_lab.learn.chapters import chapters

    done = {number for number, entry in load().items() if entry.get("passed")}
    here = {c.name: [e.number in done for e in c.exercises] for c in chapters()}
    rows, lines = [], []
    for group, entries in COURSE.items():
        boxes = "".join(_box(entry, here.get(entry.name)) for entry in entries)
        name = f'<div style="flex:0 0 8.5em;font-weight:600;padding-top:8px">{group}</div>'
        rows.append(f'<div style="display:flex;margin:5px 0">{name}<div style="flex:1">{boxes}</div></div>')
        lines += [f"{group}:", *(f"  {e.name:<22} {e.builds}{'' if e.name in here else ' (to come)'}" for e in entries)]
    return Html(f'<div class="lab-map">{"".join(rows)}</div>', "\n".join(lines))


def _box(entry: Entry, passed: list[bool] | None) -> str:
    number, title = entry.name[:2], entry.title
    edge = "1px dashed rgba(128,128,128,0.6)" if passed is None else f"1px solid rgb({OPEN})"
    share = sum(passed) / len(passed) if passed else 0
    ground = 0 if passed is None else 0.12
    fill = f"linear-gradient(to right, rgba({PASSED},0.35) {share:.0%}, rgba({OPEN},{ground}) 0)"
    style = (
        f"display:inline-block;vertical-align:top;width:10.5em;min-height:3.6em;margin:0 6px 6px 0;padding:5px 9px;"
        f"border:{edge};border-radius:4px;background:{fill};line-height:1.3"
    )
    note = f'<div style="font-size:85%;opacity:0.8">{entry.builds}</div>'
    head = f'<div>{number} <span style="font-weight:600">{title}</span></div>'
    return f'<div style="{style}">{head}{note}</div>'
