"""A small grammar of everyday English: what people ask, tell and request.

Written for this project, so that the training text has no owner but us. Slots are drawn
uniformly; ``sentence`` gives a few million different ones.
"""

import random
import re

SLOTS: dict[str, str] = {
    "person": "my sister|my brother|my mother|my father|my neighbor|the teacher|the doctor|"
    "our guest|my boss|the driver|her friend|his uncle|the waiter|my daughter|my son|the manager|"
    "the children|your cousin|the nurse|the old man|the young woman|everyone|nobody|somebody",
    "name": "Anna|Peter|Mary|John|Sarah|David|Emma|Tom|Lucy|James|Helen|Robert|Alice|Michael|Jane",
    "place": "the kitchen|the garden|the park|the office|the library|the station|the airport|"
    "the hotel|the museum|the market|the school|the bakery|the beach|the hospital|the bank|"
    "the post office|the restaurant|the living room|the garage|the city center|the church|"
    "the pharmacy|the theater|the bridge|the river|the lake|the village|the bus stop",
    "thing": "book|phone|key|umbrella|coat|bag|bottle|chair|table|letter|picture|lamp|clock|"
    "camera|ticket|box|cup|knife|newspaper|pencil|blanket|bicycle|car|window|door|computer|"
    "map|hat|ring|guitar|piano|ladder|hammer|bucket|towel|mirror|shirt|jacket|glove|candle",
    "things": "shoes|glasses|flowers|apples|eggs|dishes|clothes|tools|plants|boxes|letters|keys|"
    "photos|tickets|papers|bags|books|vegetables|cookies|sandwiches|towels|pictures|stamps",
    "food": "bread|cheese|soup|rice|chicken|fish|salad|coffee|tea|milk|orange juice|chocolate cake|"
    "ice cream|pasta|fresh fruit|a sandwich|pancakes|potatoes|mushrooms|a glass of water|"
    "butter|honey|onions|tomatoes|strawberries|a cup of tea|vegetable soup|roast beef",
    "adj": "old|new|small|big|heavy|broken|beautiful|expensive|cheap|red|blue|green|white|black|"
    "yellow|empty|clean|dirty|warm|cold|wooden|strange|quiet|lovely|large|tiny|bright|simple",
    "feeling": "tired|happy|sad|hungry|thirsty|excited|nervous|worried|surprised|angry|bored|"
    "proud|sick|ready|busy|lonely|grateful|confused|disappointed|sleepy",
    "when": "today|tomorrow|tonight|this morning|this afternoon|next week|next month|on Monday|"
    "on Tuesday|on Wednesday|on Thursday|on Friday|on Saturday|on Sunday|in the evening|"
    "after lunch|before dinner|at noon|in the summer|in the winter|this weekend|in a few days",
    "past": "yesterday|last night|last week|last month|last year|two days ago|this morning|"
    "an hour ago|a long time ago|on Sunday|last summer|in the spring|many years ago",
    "num": "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|fifteen|twenty|thirty|"
    "forty|fifty|sixty|a hundred|a thousand|twenty five|thirty six|seventy|eighty|ninety",
    "unit": "minutes|hours|days|weeks|months|years|miles|dollars|pounds|people|pages|times",
    "hour": "one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|half past one|"
    "half past seven|a quarter past two|a quarter to nine|ten past four|twenty to six",
    "weather": "sunny|cloudy|rainy|windy|foggy|very cold|quite warm|stormy|hot and dry|freezing",
    "ving": "cooking|reading|swimming|dancing|painting|cleaning|waiting|working|shopping|singing|"
    "running|walking|sleeping|studying|driving|talking|writing|fishing|playing chess|laughing",
    "vpast": "found|lost|bought|sold|broke|cleaned|fixed|painted|moved|opened|closed|forgot|"
    "borrowed|returned|wrapped|dropped|hid|carried|noticed|packed|washed|ordered|brought",
    "vinf": "find|buy|sell|clean|fix|paint|move|open|close|borrow|return|wrap|carry|pack|wash|"
    "order|bring|take|check|see|use|keep|show me|get|hold|leave|remember|choose|change",
    "verbplace": "go to|drive to|walk to|meet at|wait near|stay at|leave|visit|look for|get to",
    "color": "red|blue|green|yellow|orange|purple|brown|gray|pink|white|black|golden|silver",
    "animal": "dog|cat|horse|bird|rabbit|cow|sheep|duck|mouse|fish|squirrel|fox|bear|elephant|owl",
    "family": "grandmother|grandfather|aunt|uncle|wife|husband|cousin|parents|friends|neighbors",
    "job": "teacher|doctor|farmer|carpenter|engineer|nurse|pilot|cook|painter|lawyer|singer|"
    "writer|gardener|soldier|police officer|student|musician|scientist|mechanic|dentist",
    "transport": "train|bus|plane|taxi|boat|ferry|subway|car|bicycle",
    "because": "because it was late|because of the rain|since nobody was home|so we stayed inside|"
    "but it was closed|and it was delicious|and everyone laughed|although it was expensive|"
    "but I changed my mind|when the phone rang|while I was sleeping|before anyone noticed|"
    "after the meeting ended|if you have time|as soon as possible|without saying a word|"
    "because I was hungry|and then we went home|but nobody answered|which was a nice surprise",
    "adv": "slowly|quickly|carefully|quietly|suddenly|finally|usually|often|always|never|really|"
    "probably|certainly|almost|already|again|together|alone|outside|early|soon|loudly",
    "opinion": "I think|I believe|I hope|I am sure|I guess|she says|he told me|they say|we know|"
    "it seems|I am afraid|people say|I heard|you know|I suppose",
    "ask": "can you|could you|would you|could you please|will you|would you please|can you please",
    "subj": "I|you|we|they|he|she",
    "noun": "problem|question|answer|story|idea|plan|reason|song|game|movie|party|meeting|trip|"
    "holiday|lesson|dream|secret|mistake|promise|message|surprise|journey|accident|noise",
}  # fmt: skip

PATTERNS = """
Where did you put the {adj} {thing}?
Where is the nearest {place#bare}?
{ask} {vinf} the {things} for me?
{ask} tell me what time the {transport} leaves?
{ask} help me {vinf} this {adj} {thing}?
{ask} turn down the music a little?
{ask} wait for me at {place}?
What time does {place} open {when}?
How much does the {adj} {thing} cost?
How long does it take to {verbplace} {place}?
How many {things} do we need for the {noun}?
Do you want {food} or {food}?
Do you know where {person} went {past}?
Did you hear about the {noun} at {place}?
Have you ever seen such a {adj} {animal}?
Are you {feeling} or just {feeling}?
Is there any {food#bare} left in {place}?
Why are you so {feeling} {when}?
Who left the {adj} {thing} in {place}?
When will {person} come back from {place}?
What should we cook for dinner {when}?
What is the weather like in {place} {when}?
Which {thing} do you like best, the {color} one or the {color} one?
I would like {food} and {food}, please.
I would like to {verbplace} {place} {when}.
I need to {vinf} my {thing} before {hour} o'clock.
I have to {vinf} the {things} {when}.
I am looking for a {adj} {thing} for my {family}.
I {vpast} my {thing} near {place} {past}.
I forgot to {vinf} the {things} {because}.
I have never been to {place} before.
I usually {verbplace} {place} by {transport}.
I like {ving}, but I prefer {ving}.
I cannot find my {thing} anywhere.
My {family} used to live near {place}.
My {family} always makes {food} on Sundays.
My {thing} is too {adj}, so I need a new one.
{person} is {ving} in {place}.
{person} {vpast} the {adj} {thing} {past}.
{person} was {feeling} {because}.
{person} wants to be a {job} one day.
{name} and {name} are {ving} in {place}.
{name} {vpast} {num} {things} at {place} {past}.
{name} called {num} times {because}.
{name} asked me to {vinf} the {thing}.
We should {verbplace} {place} {when}.
We are going to {verbplace} {place} with my {family} {when}.
We waited for {num} {unit} at {place} {past}.
We had {food} and {food} for lunch {past}.
The {transport} was {num} minutes late {past}.
The {animal} is {ving#animal} under the {thing}.
The {animal} ran across the road {because}.
The weather was {weather} {past}, but {when} it will be {weather}.
It will be {weather} {when}.
It takes about {num} {unit} to {verbplace} {place}.
It is {hour} o'clock and I am still {ving}.
It was so {weather} that nobody wanted to go outside.
There is a {adj} {thing} on the {adj} table.
There were {num} {things} in the {adj} box.
There is no {food#bare} in the house.
Please {vinf} the {thing} and put it in {place}.
Please remember to {vinf} the {things} {when}.
Please sit down and have {food}.
Do not forget your {thing} when you {verbplace} {place}.
Let us {verbplace} {place} and have {food}.
{opinion} the {noun} was a big {noun}.
{opinion} it will be {weather} {when}.
{opinion} {person} is {feeling} about the {noun}.
{opinion} you should {vinf} the {adj} {thing}.
{subj#they} walked {adv} toward {place}.
{subj#they} would rather stay at home {when}.
{subj#they} never told anyone about the {noun}.
{subj#they} could not {vinf} the {thing} {because}.
She finished {ving} and {adv} closed the door.
He opened the {adj} {thing} and {adv} looked inside.
They built a {adj} house near {place}.
Thank you for the {adj} {thing}, I really like it.
Sorry I am late, the {transport} broke down.
Excuse me, is this the {transport} to {place}?
Good morning, how are you {when#day}?
Good evening, I have a table for {num} people.
Nice to meet you, my name is {name}.
Turn left at {place} and go straight for {num} {unit}.
The meeting starts at {hour} o'clock in {place}.
The doctor said that I should eat more {food#bare}.
The book is about a {adj} {animal} and a {job}.
The {color} {thing} belongs to {person}.
The price went up by {num} percent {past}.
Both of them worked as a {job} for {num} years.
If it is {weather}, we will stay at home and play cards.
When I was young, I wanted to become a {job}.
Tell me a {noun} about the {animal} and the {animal}.
What a {adj} {thing} you have there!
That is the best {food#bare} I have ever had.
This {thing} is much {adj#more} than the other one.
You look {feeling}, what happened {past}?
You can leave your {things} in {place}.
Nobody knows why the {thing} is so {adj}.
Everything was quiet until the {animal} woke up.
""".strip().splitlines()

_BARE = re.compile(r"^(the|a|an|a glass of|a cup of) ")
_SLOT = re.compile(r"\{(\w+)(?:#(\w+))?\}")
_CHOICES = {slot: words.split("|") for slot, words in SLOTS.items()}
_ANIMAL_DOES = ["sleeping", "waiting", "hiding", "running", "sitting", "jumping", "eating"]
_MORE = ["better", "older", "newer", "smaller", "bigger", "heavier", "cheaper", "cleaner", "warmer"]
_PEOPLE = ["I", "You", "We", "They", "He", "She"]


def _fill(slot: str, form: str | None, draw: random.Random) -> str:
    if form == "animal":
        return draw.choice(_ANIMAL_DOES)
    if form == "more":
        return draw.choice(_MORE)
    if form == "they":
        return draw.choice(_PEOPLE)
    if form == "day":
        return draw.choice(["today", "tonight", "this morning", "this evening"])
    word = draw.choice(_CHOICES[slot])
    return _BARE.sub("", word) if form == "bare" else word


def sentence(draw: random.Random) -> str:
    """One sentence, capitalised, with its closing mark."""
    pattern = draw.choice(PATTERNS)
    text = _SLOT.sub(lambda match: _fill(match[1], match[2], draw), pattern)
    text = re.sub(r"\ba ([aeio])", r"an \1", text)
    return text[0].upper() + text[1:]
