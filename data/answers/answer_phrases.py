"""The phrases that announce an answer, in the languages that models reason in: "the answer is", "la réponse est",
"答案是", "Ответ:", ... Linear patterns."""

import re

# noun; adjectives behind it; what joins it to the answer
_LANGUAGES = (
    ("réponses?|reponses?", "finales?|correctes?|exacte|juste", "est|sont|sera|vaut|n'est(?= pas)"),
    ("antwort(?:en)?", "", "ist|sind|lautet|wäre|beträgt"),
    ("respuestas?", "final|finales|correctas?", "es|son|sería"),
    ("risposta", "finale|corretta|esatta", "è|e'|sarà"),
    ("resposta", "final|correta|certa", "é|será"),
    ("antwoord", "", "is|luidt"),
    ("odpowiedź|odpowiedz(?:ią)?", "", "to|jest|wynosi"),
    ("odpověď|odpoveď|odpovědí", "", "je"),
    ("svaret|svar", "", "är|er|blir"),
    ("răspunsul|raspunsul|răspuns", "final|corect", "este|e"),
    ("cevap|cevabı?|yanıtı?", "", "olarak"),
    ("jawaban(?:nya)?", "akhir(?:nya)?|yang benar", "adalah|ialah"),
    ("đáp án|đáp số|câu trả lời", "cuối cùng|đúng", "là"),
    ("ответ(?:ом)?", "задачи", "равен|это|будет|является|есть|[-—–]"),
    ("відповідь(?:дю)?", "", "це|є|[-—–]"),
    ("απάντηση", "", "είναι"),
    ("الإجابة|الاجابة|الجواب|إجابة|جواب", "النهائية|النهائي|الصحيحة|الصحيح", "هي|هو|هى"),
    ("התשובה|תשובה", "הסופית|הנכונה", "היא|הוא"),
    ("پاسخ|جواب", "نهایی|صحیح|درست", "برابر است با|عبارت است از"),
    ("उत्तर|जवाब", "", "है|होगा"),
    ("উত্তর", "", "হল|হলো|হবে"),
    ("คำตอบ", "สุดท้าย|ที่ถูกต้อง", "คือ|เท่ากับ"),
    ("答え|解答|正解|回答", "", "は|が"),
    ("정답|답변|답", "", "은|는"),
    ("答案", "", "应该是|应该为|應該是|应为|就是|等于|是|为|為"),
    ("jibu", "", "ni"),
    ("సమాధానం", "", ""),
)
_MARK = r"[\s*_]*[:：=][\s*_]*"
_ADVERB = (
    r"(?:\s+(?:donc|alors|bien|also|somit|daher|entonces|portanto|quindi|dunque|dus|égale? à|igual a|uguale a|gleich))?"
)
_BEFORE_A_VALUE = r"\s*(?=\**[-+−]?[$\\(\[]?\s?[\d$\\])"
_BEFORE_A_DENIAL = r"\s*(?=(?:no|non|não|не|nicht)\s|不是)"


def _phrase(noun: str, adjectives: str, joins: str) -> str:
    """Return one language's phrase: the noun, then a joining word, a colon, or nothing right before a value."""
    adjective = rf"(?:\s*\b(?:{adjectives}))?" if adjectives else ""
    join = rf"[\s*]*(?:{joins})(?![a-zà-ÿа-я]){_ADVERB}[\s*]*[:：]?[\s*]*|" if joins else ""
    return rf"(?:{noun}){adjective}(?:{join}{_MARK}|{_BEFORE_A_VALUE}|{_BEFORE_A_DENIAL})"


OTHER_LANGUAGES = re.compile(
    r"(?i)(?<![a-zà-ÿа-я])(?:"
    + "|".join(_phrase(*language) for language in _LANGUAGES)
    + r")|(?m:^)[ \t*]*(?:A|Ans)(?::|(?<=s)\.)\s*"
)
# An answer that is called final in so many words: it takes the place of a box before it.
FINAL = re.compile(
    r"(?i)(?:\bfinal\s+answer\**\s*(?:(?:is|are|=)\b[:=]?|[:：]\**)"
    r"|最[终終后後](?:的)?(?:答案|结果|結果)\s*(?:是|为|為)?\s*[:：]?|réponse\s+finale\s*(?:est\b|:)"
    r"|(?:endgültige|finale|abschließende)\s+antwort\s*(?:ist\b|lautet\b|:)|respuesta\s+final\s*(?:es\b|:)"
    r"|risposta\s+finale\s*(?:è(?!\w)|:)|resposta\s+final\s*(?:é(?!\w)|:)|(?:окончательный|итоговый)\s+ответ\s*(?:[-—–:]|это\b)"
    r"|最終(?:的な)?(?:答え|解答|回答)\s*(?:は|[:：])|최종\s*(?:정답|답변|답)\s*(?:은|는|[:：])"
    r"|(?:الإجابة|الاجابة|الجواب)\s+(?:النهائية|النهائي)\s*(?:هي|هو|:)|ostateczna\s+odpowiedź\s*(?:to\b|:)"
    r"|definitief\s+antwoord\s*(?:is\b|:))\s*(?:\*\*|(?:(?-i:simply|just)|therefore|thus)\b|[:：])?\s*"
)
_ENDINGS = re.compile(
    r"\s*(?:です|である|でした|だ|となります|になります|입니다|이다|이에요|예요|है|हैं|होगा|است|olur|['’]?(?:d|t)[iıuü]r|ครับ|ค่ะ)\s*[.。।]?\s*$"
)


_OR = re.compile(
    r"\s*(?:或者|或是|或|または|もしくは|又は|또는|혹은)\s*"
    r"|(?<=[\d$)\]}*])\s+(?:ou|oder|o|или|або|أو|atau|veya|hoặc|lub|albo|eller|या)\s+(?=[-+$\\(\[{*\d])"
)
_AND = re.compile(
    r"(?<=[\d$)\]}*])\s*(?:以及|和|与|および|と|그리고|와|과)\s*(?=[-+$\\(\[{*\d])"
    r"|(?<=[\d$)\]}*])\s+(?:et|und|y|e|и|і|dan|ve|và|och|og|और)\s+(?=[-+$\\(\[{*\d])"
)
_POINT_LANGUAGES = re.compile(r"[\u0590-\u06ff\u0900-\u0e7f\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]|answer|jibu")
_NOT = re.compile(
    r"(?i)\**(?:(?:not|nicht|pas|no(?= (?:es|son))|non|não|не|nie|niet|inte|ikke)"
    r"\s+(?:(?:equal to|simply|just|really|yet|es|son|é|è|to|egal à|gleich)\s+)?|不是\s*|아니)"
    r"(?=\**\s*[-+−]?\s*(?:[$£€]?\s*\.?\d|\$(?!\\text)|\\(?!text)|[(\[{√π∞½]|[a-z](?:_\w)?(?:\s*[-.,;=+*/^<>]|\s*$)))"
)
_DECIMAL_COMMA = re.compile(r"(?<![\d,.])(\d+),(\d{1,2}|\d{4,})(?![\d,])")


def in_plain_form(answer: str, phrase: str) -> str:
    """Return what another language's sentence says after a phrase, in English: without the verb at its end (`5です`,
    `5입니다`), with "or" and "and", and with a decimal point in a number that stands alone, where the phrase's language
    has a comma there (`3,5`; `1,234` stays)."""
    answer = (answer if answer.isascii() else _ENDINGS.sub("", answer)).strip("* ")
    if not re.search(r"[$\\(\[{]", answer) and not _POINT_LANGUAGES.search(phrase.lower()):
        answer = _DECIMAL_COMMA.sub(r"\1.\2", answer)
    return _AND.sub(" and ", _OR.sub(" or ", answer)).strip()


def is_denied(answer: str) -> bool:
    """Say whether what follows the phrase says which value the answer is not: `not 5`, `not $x$`; "no solution" and
    "not enough information" are answers."""
    return _NOT.match(answer) is not None
