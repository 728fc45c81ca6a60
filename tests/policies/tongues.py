# ruff: noqa: RUF001
"""Long talks in five languages: what was said early, what is asked late, and the words that answer it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tongue:
    """Statements with the question about each and the words that its answer has, what else is talked about, thanks."""

    facts: tuple[tuple[str, str, str], ...]
    chat: tuple[tuple[str, str], ...]
    thanks: str

    def talk(self, times: int) -> list[dict[str, str]]:
        """A beginning, the statements, each answered, and then the chat so many times over."""
        said = [self.chat[1], *((fact[0], self.chat[0][1]) for fact in self.facts)]
        said += [(f"({n + 1}) {a}", f"{b} ({n + 1})") for n in range(times) for a, b in self.chat]
        return [
            {"role": role, "content": text}
            for pair in said
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]


TONGUES = {
    "en": Tongue(
        (
            (
                "My sister Karen moved to Oslo in March because of her new job.",
                "Which city does my sister live in?",
                "Oslo",
            ),
            (
                "The wifi password at the cabin is heron-lake-77.",
                "What is the password for the cabin's wifi?",
                "heron-lake-77",
            ),
        ),
        (
            ("How do I remove a coffee stain from a shirt?", "Rinse it with cold water first, then use a little soap."),
            ("Tell me about the history of Rome.", "Rome grew from a small town on the Tiber to a great empire."),
            ("Which exercises are good for my back?", "Gentle stretching and swimming help. Begin slowly."),
            ("How do tides come about?", "The moon pulls at the sea, so water rises on both sides of the earth."),
        ),
        "Thanks!",
    ),
    "de": Tongue(
        (
            (
                "Wir haben die Mietwohnung zum 1. August gekündigt.",
                "Zu wann haben wir die Wohnung gekündigt?",
                "1. August",
            ),
            ("Mein Bruder Jonas arbeitet jetzt in Graz.", "In welcher Stadt arbeitet mein Bruder?", "Graz"),
        ),
        (
            (
                "Wie bekomme ich einen Kaffeefleck aus dem Hemd?",
                "Spüle ihn mit kaltem Wasser aus, dann nimm etwas Seife.",
            ),
            (
                "Erzähl mir etwas über die Geschichte Roms.",
                "Rom wuchs von einer kleinen Siedlung am Tiber zu einem Reich.",
            ),
            ("Welche Übungen sind gut für den Rücken?", "Sanftes Dehnen und Schwimmen helfen. Fang langsam an."),
            ("Wie entstehen Ebbe und Flut?", "Der Mond zieht am Meer, so steigt das Wasser auf beiden Seiten."),
        ),
        "Danke!",
    ),
    "zh": Tongue(
        (
            ("我妹妹三月份因为工作搬到了成都。", "我妹妹现在住在哪个城市？", "成都"),
            ("小木屋的无线网密码是苍鹭七七。", "小木屋的无线网密码是多少？", "苍鹭七七"),
        ),
        (
            ("衬衫上的咖啡渍怎么去掉？", "先用冷水冲洗，然后用一点肥皂。"),
            ("给我讲讲罗马的历史吧。", "罗马从台伯河边的小城发展成环绕地中海的帝国。"),
            ("哪些运动对背部有好处？", "轻轻的拉伸和游泳对背部有好处，慢慢开始。"),
            ("潮汐是怎么形成的？", "月亮吸引海水，所以地球两边的水位都会上升。"),
        ),
        "谢谢！",
    ),
    "ja": Tongue(
        (
            ("うちの犬の名前はコタロウで、四歳です。", "うちの犬の名前は何でしたか？", "コタロウ"),
            ("田中先生の予約は六月十四日の午前に変わりました。", "田中先生の予約はいつですか？", "六月十四日"),
        ),
        (
            ("シャツのコーヒーのしみはどうやって落としますか？", "まず冷たい水ですすいで、それから石けんで洗います。"),
            ("ローマの歴史について教えてください。", "ローマはテベレ川の小さな町から帝国に成長しました。"),
            ("背中に良い運動は？", "軽いストレッチや水泳が良いです。ゆっくり始めてください。"),
            ("潮の満ち引きはどうして起こりますか？", "月が海を引くので、地球の両側で水位が上がります。"),
        ),
        "ありがとう",
    ),
    "ar": Tongue(
        (
            ("انتقلت أختي مريم إلى طنجة في مارس بسبب وظيفتها الجديدة.", "في أي مدينة تعيش أختي مريم الآن؟", "طنجة"),
            ("كلمة سر الواي فاي في الكوخ هي بلشون77.", "ما كلمة السر للواي فاي في الكوخ؟", "بلشون77"),
        ),
        (
            ("كيف أزيل بقعة قهوة من القميص؟", "اشطفها بالماء البارد أولا، ثم استعمل قليلا من الصابون."),
            ("حدثني عن تاريخ روما.", "نمت روما من بلدة صغيرة على نهر التيبر إلى إمبراطورية."),
            ("ما التمارين المفيدة للظهر؟", "التمدد الخفيف والسباحة مفيدان للظهر. ابدأ ببطء."),
            ("كيف يحدث المد والجزر؟", "يجذب القمر البحر، فيرتفع الماء على جانبي الأرض."),
        ),
        "شكرا!",
    ),
}
