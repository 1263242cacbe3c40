"""The rewards that come with turnwise, on answers whose worth can be worked out by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.reward_episodes import make_episode, make_group

from turnwise.config import RewardConfig, RewardsConfig
from turnwise.errors import RewardError
from turnwise.rewards import vsibench
from turnwise.rewards.builtin import BUILTINS, load_builtin
from turnwise.rewards.builtin.json_validity import find_objects
from turnwise.rewards.builtin.language import language_probability
from turnwise.rewards.builtin.text import score_text
from turnwise.rewards.interface import EvaluateResult
from turnwise.rewards.score import build_rewards, score_groups
from turnwise.types import Episode, Score


def said(*answers: str, prompt: str = "Say something.") -> list[dict[str, Any]]:
    return [
        message
        for answer in answers
        for message in ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer})
    ]


def score(name: str, episode: Episode, **params: Any) -> Score:
    config = RewardsConfig(functions=(RewardConfig(name=name, params=params),))
    with build_rewards(config) as rewards:
        return asyncio.run(score_groups([make_group(episode)], rewards))[episode.episode_id]


def test_every_built_in_loads_under_its_own_name() -> None:
    assert {load_builtin(name).name for name in BUILTINS} == set(BUILTINS)


# Text, with the ranges of its first description


@pytest.mark.parametrize(
    "text",
    [
        "यह एक छोटी कविता है जो सुबह की धूप, पुराने पेड़ और नदी के किनारे खेलते बच्चों के बारे में है; "
        "हवा धीरे धीरे चलती है और पक्षी मीठे गीत गाते हैं, मन शांत हो जाता है।",
        "这是一个关于春天的故事。清晨的阳光照在河面上，孩子们在老树下唱歌，风轻轻地吹过田野，大家都很高兴。",
        "Это рассказ о весеннем утре: солнце светит над рекой, дети поют под старым деревом, ветер тихо идёт по полю, "
        "и каждый человек в нашей деревне чувствует, что долгая зима наконец прошла и начинается новая жизнь.",
        "هذه قصة قصيرة عن صباح الربيع حيث تشرق الشمس فوق النهر ويغني الأطفال تحت الشجرة القديمة وتهب الريح برفق على "
        "الحقول ويشعر كل إنسان في قريتنا بأن الشتاء الطويل قد انتهى أخيرا وبدأت حياة جديدة",
    ],
)
def test_good_multilingual_text_earns_080_to_100(text: str) -> None:
    assert 0.8 <= sum(score_text("Write a story.", text).values()) <= 1.0


@pytest.mark.parametrize(
    "text",
    [
        "The morning sun rose over the river while children sang beneath the old tree and the wind moved softly.",
        "Gradient descent follows the slope of the loss downhill; each update moves the weights a little, and a smaller "
        "step size trades speed for stability, which is why schedules start large and shrink over time.",
    ],
)
def test_good_english_earns_050_to_070(text: str) -> None:
    assert 0.5 <= sum(score_text("Write a story.", text).values()) <= 0.7


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("Translate to Hindi: Hello world", "Hello world"),
        ("Write a story.", "Hello there."),
        ("Write a story.", "नमस्ते दुनिया"),
        (
            "Tell me about the river and the old tree at dawn",
            "Tell me about the river and the old tree at dawn",
        ),
        ("Repeat.", "word " * 200),
        ("Repeat.", "yes no " * 200),
    ],
)
def test_short_echoed_or_repeated_text_earns_010_to_030(prompt: str, text: str) -> None:
    assert 0.1 <= sum(score_text(prompt, text).values()) <= 0.3 + 1e-9


@pytest.mark.parametrize("text", ["", "   ", "!!! ???", "\u200b\u200b"])
def test_no_words_earn_nothing(text: str) -> None:
    assert sum(score_text("Write.", text).values()) == 0.0


def test_the_text_reward_scores_each_turn() -> None:
    result = load_builtin("text")(said("", "Hello there."))
    assert [output.step_index for output in result.step_outputs] == [0, 1]
    # "Hello there.": 2 of 32 words, not an echo, two different words.
    expected = 0.4 * 2 / 32 + 0.3 * 2 / 3
    assert [output.base_reward for output in result.step_outputs] == pytest.approx([0.0, expected])
    assert result.score == pytest.approx(expected / 2)


# Language

SENTENCES = {
    "ar": "ذهبت أمس إلى السوق واشتريت بعض الخضروات الطازجة لعائلتي.",
    "bn": "আমি গতকাল বাজারে গিয়েছিলাম এবং আমার পরিবারের জন্য কিছু তাজা সবজি কিনেছি।",
    "de": "Gestern bin ich auf den Markt gegangen und habe frisches Gemüse für meine Familie gekauft.",
    "el": "Χθες πήγα στην αγορά και αγόρασα φρέσκα λαχανικά για την οικογένειά μου.",
    "en": "Yesterday I went to the market and bought some fresh vegetables for my family.",
    "es": "Ayer fui al mercado y compré algunas verduras frescas para mi familia.",
    "fr": "Hier, je suis allé au marché et j'ai acheté des légumes frais pour ma famille.",
    "he": "אתמול הלכתי לשוק וקניתי ירקות טריים למשפחה שלי.",
    "hi": "कल मैं बाज़ार गया और अपने परिवार के लिए कुछ ताज़ी सब्ज़ियाँ खरीदीं।",
    "it": "Ieri sono andato al mercato e ho comprato delle verdure fresche per la mia famiglia.",
    "ja": "昨日、私は市場に行って、家族のために新鮮な野菜を買いました。",
    "ko": "어제 나는 시장에 가서 가족을 위해 신선한 채소를 샀습니다.",
    "pt": "Ontem fui ao mercado e comprei alguns legumes frescos para a minha família.",
    "ru": "Вчера я ходил на рынок и купил свежие овощи для своей семьи.",
    "sw": "Jana nilienda sokoni na kununua mboga mbichi kwa ajili ya familia yangu.",
    "ta": "நேற்று நான் சந்தைக்குச் சென்று என் குடும்பத்திற்காக புதிய காய்கறிகளை வாங்கினேன்.",
    "th": "เมื่อวานฉันไปตลาดและซื้อผักสดให้ครอบครัวของฉัน",
    "tr": "Dün pazara gittim ve ailem için taze sebzeler aldım.",
    "vi": "Hôm qua tôi đã đi chợ và mua một ít rau tươi cho gia đình tôi.",
    "zh": "昨天我去了市场，给家人买了一些新鲜的蔬菜。",
}


@pytest.mark.parametrize("language", sorted(SENTENCES))
def test_each_language_is_recognised_and_no_other_is_paid_for_it(language: str) -> None:
    pytest.importorskip("py3langid", reason="the extra `lang` is not installed")
    assert language_probability(SENTENCES[language], language) > 0.9
    others = [language_probability(text, language) for code, text in SENTENCES.items() if code != language]
    assert max(others) < 0.1


def test_the_wanted_language_comes_from_params_truth_or_task() -> None:
    pytest.importorskip("py3langid", reason="the extra `lang` is not installed")
    hindi = SENTENCES["hi"]
    for episode, params in [
        (make_episode(hindi), {"language": "hi"}),
        (make_episode(hindi, ground_truth="hi"), {}),
        (make_episode(hindi, ground_truth={"language": "hi"}), {}),
        (make_episode(hindi, data={"language": "hi"}), {}),
    ]:
        assert (score("language", episode, **params).score or 0) > 0.9
    assert (score("language", make_episode(SENTENCES["en"]), language="hi").score or 0) < 0.1
    assert "no language is asked for" in str(score("language", make_episode(hindi)).error)
    assert "py3langid does not know xx" in str(score("language", make_episode(hindi), language="xx").error)
    assert score("language", make_episode("1234 !!"), language="en").score == 0.0


# Comparing with the truth


@pytest.mark.parametrize(
    ("name", "answer", "truth", "params", "expected"),
    [
        ("exact", " Paris. ", "paris", {}, 1.0),
        ("exact", "Paris, France", "paris", {}, 0.0),
        ("exact", "PARIS", ["Lyon", "Paris"], {}, 1.0),
        ("exact", "paris", "Paris", {"strict": True}, 0.0),
        ("exact", "I think <answer>Paris</answer>", "Paris", {"extract": "<answer>(.*?)</answer>"}, 1.0),
        ("exact", "no tag", "Paris", {"extract": "<answer>(.*?)</answer>"}, 0.0),
        ("exact", "4", 4, {}, 1.0),
        ("regex", "the code is 4711", r"\b\d{4}\b", {}, 1.0),
        ("regex", "no digits", None, {"pattern": r"\d"}, 0.0),
        ("numeric", "2 + 2 makes 4.0", 4, {}, 1.0),
        ("numeric", "about 1,234.5", "1234.5", {}, 1.0),
        ("numeric", "3.9", 4, {"absolute_tolerance": 0.2}, 1.0),
        ("numeric", "3.9", 4, {}, 0.0),
        ("numeric", "four", 4, {}, 0.0),
        ("numeric", "-1e3", -1000, {}, 1.0),
    ],
)  # fmt: skip
def test_answers_are_compared_with_the_truth(
    name: str, answer: str, truth: Any, params: dict[str, Any], expected: float
) -> None:
    assert score(name, make_episode("ignored", answer, ground_truth=truth), **params).score == expected


@pytest.mark.parametrize(("name", "truth"), [("exact", None), ("numeric", "many"), ("regex", None)])
def test_without_a_truth_there_is_no_score(name: str, truth: Any) -> None:
    found = score(name, make_episode("x", ground_truth=truth))
    assert found.score is None
    assert found.error


# JSON


def test_json_is_found_with_nothing_around_it_when_asked() -> None:
    episode = make_episode('go {"move": "left"} now', '{"move": "left"}', '{"move": NaN}', "{'move': 1}")
    assert score("json", episode).step_rewards == (1.0, 1.0, 0.0, 0.0)
    assert score("json", episode, whole=True).step_rewards == (0.0, 1.0, 0.0, 0.0)
    assert score("json", episode, keys=["turn"]).score == 0.0
    assert score("json", episode, keys=["move"]).score == 0.5


def test_objects_are_found_past_braces_that_open_none() -> None:
    assert find_objects('{ {"a": {"b": "}"}} {"c": 1}') == [{"a": {"b": "}"}}, {"c": 1}]
    assert find_objects("{" * 5000) == []
    assert find_objects('{"a":' * 3000) == []


# Navigation


def walk(*distances: float, **metrics: float) -> Episode:
    """An episode with the distance to the goal before each step, and the last one after it."""
    import msgspec

    episode = make_episode(
        *("go" for _ in distances[:-1]), metrics={"distance_to_goal": distances[-1], **metrics}
    )
    turns = tuple(
        msgspec.structs.replace(
            turn, observation=msgspec.structs.replace(turn.observation, info={"distance_to_goal": distance})
        )
        for turn, distance in zip(episode.turns, distances, strict=False)
    )
    return msgspec.structs.replace(episode, turns=turns)


def test_navigation_pays_success_efficiency_and_progress_as_asked() -> None:
    episode = walk(4.0, 3.0, 3.5, 1.0, success=1.0, spl=0.8)
    plain = score("navigation", episode)
    assert (plain.score, plain.step_rewards) == (1.0, ())
    found = score("navigation", episode, success=0.5, spl=1.0, progress=2.0)
    assert found.score == pytest.approx(0.5 + 0.8 + 2.0 * 0.75)
    assert found.step_rewards == pytest.approx((2 * 0.25, 2 * -0.125, 2 * 0.625))
    assert found.metrics["progress"] == pytest.approx(0.75)


def test_navigation_says_which_figure_is_missing() -> None:
    assert "reports no success" in str(score("navigation", make_episode("go")).error)
    missing = score("navigation", make_episode("go", metrics={"success": 1.0}), progress=1.0)
    assert "reports no distance_to_goal" in str(missing.error)


# VSI-Bench


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("A", "A"), ("b.", "B"), ("(C)", "C"), ("B. Turn Left", "B"), ("The answer is D", "D"), ("A\nbecause", "A"),
        ("Answer: C. Turn back", "C"), ("I first thought answer A but the answer is B", "B"), ("Turn left", None),
        ("A robot would choose C", "C"), ("", None), ("Either B or C", None), ("cat", None), ("**B**", "B"), ("E", "E"), ("I think it must be B", "B"),
    ],
)  # fmt: skip
def test_the_chosen_letter_is_found(answer: str, letter: str | None) -> None:
    assert vsibench.find_letter(answer) == letter


@pytest.mark.parametrize(
    ("answer", "is_match"),
    [
        ("A", True),
        ("a.", True),
        ("A. Turn left", True),
        ("(A)", False),
        ("The answer is A", False),
        ("A\nso", False),
    ],
)
def test_the_official_rule_is_kept_beside(answer: str, is_match: bool) -> None:
    assert vsibench.is_official_match(answer, "A") is is_match


@pytest.mark.parametrize(
    ("value", "target", "expected"),
    [
        (10.0, 10.0, 1.0), (9.0, 10.0, 0.9), (11.0, 10.0, 0.9), (9.5, 10.0, 1.0), (9.4, 10.0, 0.9), (5.0, 10.0, 0.1),
        (15.0, 10.0, 0.1), (4.9, 10.0, 0.0), (15.1, 10.0, 0.0), (7.0, 10.0, 0.5), (None, 10.0, 0.0), (0.0, 0.0, 1.0),
        (12.0, 10.0, 0.7), (8.0, 10.0, 0.7), (10.4, 10.0, 1.0), (10.6, 10.0, 0.9), (1.0, 0.0, 0.0),
    ],
)  # fmt: skip
def test_mean_relative_accuracy_counts_the_tolerances_kept(
    value: float | None, target: float, expected: float
) -> None:
    assert vsibench.mean_relative_accuracy(value, target) == pytest.approx(expected)


def test_the_overall_score_counts_directions_once() -> None:
    scores = {
        "object_rel_direction_easy": [1.0],
        "object_rel_direction_medium": [0.5],
        "object_rel_direction_hard": [0.0, 0.0],
        "object_counting": [1.0, 0.0],
        "route_planning": [0.0],
    }
    assert vsibench.summarize(scores)["overall"] == pytest.approx((0.5 + 0.5 + 0.0) / 3)
    with pytest.raises(RewardError, match="no VSI-Bench score"):
        vsibench.summarize({})


@pytest.mark.parametrize(
    ("answer", "truth", "data", "expected"),
    [
        ("B", {"answer": "B", "question_type": "route_planning"}, {}, 1.0),
        ('{"answer": "B. Turn left", "done": true}', "B", {"question_type": "route_planning"}, 1.0),
        ("It is 4.5 meters", "5", {"question_type": "object_abs_distance"}, 0.9),
        ("no idea", "5", {"question_type": "object_abs_distance"}, 0.0),
    ],
)
def test_vsibench_scores_choices_and_numbers(
    answer: str, truth: Any, data: dict[str, Any], expected: float
) -> None:
    found = score("vsibench", make_episode(answer, ground_truth=truth, data=data))
    assert found.score == pytest.approx(expected)


def test_vsibench_without_a_question_type_is_unscored() -> None:
    assert score("vsibench", make_episode("A", ground_truth="A")).score is None
    unknown = score("vsibench", make_episode("A", ground_truth="A", data={"question_type": "smell"}))
    assert "no question type 'smell'" in str(unknown.error)


def test_an_unknown_reward_suggests_the_nearest() -> None:
    with pytest.raises(RewardError, match=r"did you mean environment\?"):
        build_rewards(RewardsConfig(functions=(RewardConfig(name="enviroment"),)))


def test_results_refuse_what_is_not_a_number() -> None:
    for bad in (float("nan"), float("inf"), "1", True, None, 1j, 10**400):
        with pytest.raises(ValueError):
            EvaluateResult(score=bad, step_outputs=None) if bad is not None else EvaluateResult()  # type: ignore[arg-type]
