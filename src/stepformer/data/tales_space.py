"""The dialect "space": stations, rovers, robots and leaks. The notation is explained in `tales`."""

from __future__ import annotations

from stepformer.data.tales_space_words import ROLES, TABLES

__all__ = ["PLOTS", "ROLES", "RULES", "TABLES"]

RULES = {
    "opening": """
Aboard the {station}, {world.sky}, [lived|served] a {trait} young cadet named {hero}. {hero.He} {trait.habit}.
First bell rang on the {station}. Outside the window hung {world}, {world.look}. Cadet {hero} [floated out of
 {hero.his} bunk|zipped up {hero.his} suit|was already awake].
{hero} was the [youngest|smallest|newest] cadet on the {station}, a station {world.sky}. Everybody knew that {hero}
 {trait.habit}.
It was an ordinary shift on the {station}. {world} shone through the porthole, {world.look}, and cadet {hero} [was in
 a <mood> mood|had finished the morning checks].
The {station} was {world.sky}. A {trait} {hero.child} called {hero} [was on duty|had the early watch] {deck2.on}.
 {deck2.sight}.
Cadet {hero}, who {trait.habit}, had been on the {station} for {sum.total} [weeks|months]. Every day {hero.he} looked
 out at {world}, {world.look}.
""",
    "hero_low": """
{hero} [swallowed hard|felt cold inside|leaned against the wall|stared at {hero.his} boots].
[All at once|For the first time] {hero} felt [very small|very far from home|as helpless as a balloon].
{hero}'s stomach [tightened|turned as if gravity had failed].
"This is [hopeless|a disaster]," [muttered|murmured] {hero}.
For a [second|minute] {hero} [wished {hero.he} were somewhere else|did not know what to do].
""",
    "hero_high": """
{hero} [punched the air|whooped|turned a somersault|beamed behind {hero.his} visor].
{hero}'s [eyes shone|grin was wider than the hatch|cheeks were as warm as a reactor].
[Never had|Seldom had] {hero} felt [so useful|so much like a real astronaut|so brave].
{hero} was so proud that {hero.he} [nearly floated|could not sit still|forgot to be tired].
"[Mission complete|We did it|All systems go]!" [called|cheered|shouted] {hero}.
""",
    "ponder": """
{hero} went through the manual in {hero.his} mind, page by page.
{hero} [tapped {hero.his} chin|drew a sketch on the frosty glass|took a slow breath] and considered.
{hero} [kept calm|tried to think clearly]. What [did they know so far|would {captain} do|had they learned in class]?
""",
    "pair_up": """
"[Copy that|Count me in]," said {friend}. "[You lead, I follow|Cadets stick together]."
"Protocol says [never go alone|two by two]," said {friend}, and [clipped on a lamp|grabbed a torch].
{friend} [put down a half-eaten bar|closed {friend.his} book]. "I am coming too," said {friend}.
""",
    "report": """
"[Report|Well, cadet]?" said {captain}. {hero} [stood straight|saluted] and told everything.
{captain} listened with folded arms and then [nodded|smiled]. "[Good work|Well flown], cadet," said {captain}.
{captain} wrote {hero}'s name in the log, [and underlined it|which was a great honour].
""",
    "detail": """
{friend} wore {hue2} [boots|gloves|overalls|goggles] and [hummed the station song|counted the rivets|sucked on a juice
 bulb].
{friend}, who {trait2.habit}, [kept unusually quiet|talked without a pause|was full of plans].
Far away [a tug|a satellite|a chunk of ice|a mail pod|a swarm of pebbles] [glided|tumbled|drifted] past {world}.
In {friend}'s pocket there was {clutter4}, [for luck|as always|just in case].
""",
    "hum": """
[Somewhere|Far off] a [fan clicked|pump sighed|door slid open|relay snapped|winch whined], and the air smelled of
 [warm plastic|ozone|mint|machine oil|fresh paint|burnt toast].
[Behind the wall|Under the floor|In the ceiling] something [gurgled|ticked|hummed a low note|knocked twice].
""",
    "through": """
The shortest way led through the {deck}. {deck.sight}.
{hero} pulled {hero.himself} along the rail to the {deck}. {deck.sight}.
{hero} passed the {deck}. {deck.sight}.
""",
}

PLOTS = {
    "air leak": """
<opening>
Suddenly {hero} heard a {leak.sound}. [On the wall|Beside the hatch] the pressure needle [crept down|was
 falling|trembled and sank]: [the air|air] was [leaking out|escaping]!
? A {hue} warning light began to blink.
"[Hull leak|We have a leak]!" {hero} called over the radio. "[Stay calm and find it|You have {sum.total} minutes],"
 answered {captain}.

<pair_up>
? [<detail>|<hum>]
They searched the {deck} first. {deck.sight}, but there the air was still.
? {friend} looked behind a panel and found {clutter}, but no hole.
/ "Air flows toward a hole," said {hero}. {hero.He} [let go of a feather|shook some dust into the air], and it drifted
 away.
/ "Let the smoke show us," said {hero}, and {friend} lit a match. The smoke [bent|leaned] to one side.
They followed it to a spot {leak.where}. There it was: {leak.cause}.
/gum: {hero} pressed {patchwork} on it, but {patchwork} did not hold, and the needle fell again.
/ "Quickly!" said {friend}. {hero}'s fingers [trembled|were numb with cold].
when gum: "We need something better," said {friend}. <ponder>
What it needed was {leak.patch}. {hero} [fetched the kit|opened the repair box] and did it, just as in training.

The {leak.sound} [grew weaker and stopped|faded and was gone]. The needle [stood still and then rose|climbed
 again|swung back into the green].
? <hero_high>
/ <report>
/ <night> the two of them [shared {snack}|drank cocoa] and listened to the lovely silence.
/ "{sum.part} minutes," said {captain}. "You still had {sum.more} left."
? After that, {hero} checked the needle at every bell.
""",
    "missing robot": """
<opening>
The {robot.job} of the station was called {robot}, and {hero} [liked it best of all the machines|had painted it {hue}].
But when first bell rang, {robot} did not come. [Its dock was empty|Nobody had seen it].
? "{robot} is only a machine," said {rival}. "{robot} is my friend," said {hero}.
? <hero_low>

"I am going to [look for it|search the station]," said {hero}. <pair_up>
? [<detail>|<hum>]
/ They called its name {deck.on}. {deck.sight}, but no {robot} answered.
/ {deck.on} they found only {clutter} and {clutter2}.
<later> {hero} noticed something: {robot.hint}.
? "That is no accident," said {friend}. "[Follow it|Come on]!"
There, {robot.where}, stood {robot}, the {robot.job}. It [could not help itself|was quite helpless], because
 {robot.flaw}.
/ "Poor {robot}," said {hero}. "[You only need help|Hold on]."
/ "Is it broken?" asked {friend}. "No," said {hero}, "[just helpless|I know what to do]."
{hero} {robot.fix}. [For a moment nothing happened|They waited, and nothing moved|A second passed, then another]. Then
 {robot} [beeped|blinked] twice and [rolled forward|woke up].

"Thank you, {hero}," said {robot} in its [tinny|small] voice.
/ Soon the {robot.job} was back at work, as if nothing had happened.
/ {robot} followed {hero} for the rest of the shift, [like a puppy|and hummed].
? Even {captain} was relieved, for without a {robot.job} the {station} was not the same.
/ {hero} wrote in the log: "{robot} was found, {robot.where}."
/ <hero_high>
""",
    "rover trip": """
[On the third day of the mission|Early in the shift] {hero} and {friend} drove out in the {hue} rover. Above them hung
 {world}, {world.look}. They had {sum.part} tanks of air and {sum.more} in reserve, so {sum.total} in all.
{hero} [steered|drove], and {friend} read the map. Their task was to [collect|find] a piece of {gem} for the rock lab.
? {hero} {opposite.one} and {friend} {opposite.other}, but they made a good crew.
? <detail>

But {rover.cause}, and therefore {rover.effect}.
{rover.fail}.
? <hero_low>
/ "We have {sum.total} tanks of air," said {friend}. "[That is enough|Do not panic]."
/ "[Base|Hello, base], this is the rover," said {hero} into the radio. "We [are stuck|need help]."
Soon {rover} the {rover.post} came over the hill [in a buggy|on a hopper]. "What you need is {rover.need}," {rover.he}
 said.
{rover.cure}. "[Thank you|We owe you one], {rover}!" said {hero}.

Behind the next ridge {friend} saw something {gem.hue}. It was {gem}! It {gem.trait}, just as the book said.
/ {hero} put it in a bag and wrote the place on the label.
/ They used {sum.part} tanks on the way, and {sum.more} {sum.were} left when they came home.
? "Next time we take {rover.need} along," said {friend}, and {hero} put it on the list.
<night> the {gem} lay in the rock lab, [and everybody came to look|under a glass dome].
? <hero_high>
""",
    "sick plants": """
<opening>
In the greenhouse {hero} and {friend} took care of the {plant}. There were {sum.part} pots in the first row and
 {sum.more} in the second, {sum.total} altogether.
But one day the {plant} {plant.sick}. [Nobody knew why|It got worse with every shift|That had never happened before].
? <hero_low>

/ {hero} gave them more water, but that [did not help|only made puddles that floated away].
/ {friend} [sang to them|read them a story], but the {plant} did not care.
? [<detail>|<hum>]
"Plants cannot talk," said {hero}. "So we must look closely." <ponder>
/ "{plant} like {plant.light}," said {friend}, reading from the manual. "And yours?"
/expert: Priya Nair the botanist [came by|floated in]. "Ask what has changed," said the botanist.
{hero} looked at the lamp, the hose and the roots. Then {hero.he} saw it: {plant.reason}.
So {hero} and {friend} {plant.help}.

[Three days later|After a week] the {plant} [stood straight|were healthy] again.
/ At harvest they picked {sum.total} {plant}, one from every pot, all ripe and {plant.hue}.
/ The first {plant.one} was {plant.hue} and tasted of [summer|home].
/ Out of {sum.total} pots, {sum.part} carried fruit, and {sum.more} {sum.were} still in bloom.
? "It is the only thing on board that was not printed," said {captain}, [chewing slowly|and asked for more].
when expert: "You have a botanist's eyes," said Priya Nair.
<hero_high>
""",
    "strange signal": """
<opening>
{hero} sat [in the signal room|at the radio] with {hero.his} headphones on. There was only [static|a soft crackle|the
 hiss of the stars]. Then came {signal}.
? {hero} [sat up|turned the dial|held {hero.his} breath].
"Do you hear that?" asked {hero}. {friend} listened. "It could be {signal.guess}!" {friend.he} [whispered|said].
? A shiver ran down {hero}'s back.

/ {rival} wanted to switch the radio off. "[Better not answer|Leave it alone]," said {rival}.
/ "[Do not guess|First we measure]," said {hero}, "then we will know."
{hero} wrote the pattern down, and it came again {sum.part} times, and after a pause {sum.more} more: {sum.total} in
 all.
? <ponder>
? [<detail>|<hum>]
They [turned|aimed] the antenna and asked Ines Calder the astronomer for help.
/ "It comes from there," said Ines Calder, and pointed past {world}.
/ Ines Calder wiped the mirror with a lens cloth and looked. "That is [close|not far]," said the astronomer.
<later> the telescope showed what it was. It was not {signal.guess}. It was {signal.source}.

/ "How [wonderful|strange]," said {hero}. {friend} laughed with relief.
/ {friend} blushed a little. "My guess was [better|more exciting]," said {friend}.
So they {signal.reply}.
? <report>
? Now, whenever {hero} hears {signal}, {hero.he} thinks of {signal.source}.
/ <night> {hero} lay awake and listened to the [endless|wide] dark. It did not seem so empty any more.
/ <hero_high>
""",
    "late ship": """
The supply ship was late, and on the {station} the shelves were [almost bare|getting empty]. There were {sum.total}
 [boxes of noodles|bags of rice|tins of soup] left for everyone.
? Outside hung {world}, {world.look}, but no ship was in sight.
"We must [share|be careful]," said {captain}. "{sum.part} for this week and {sum.more} for the next."
Cadet {hero}, who {trait.habit}, [was hungry|dreamed of cake].

/theft: The next day one was missing. "Who took it?" asked {rival}, and looked at {friend}.
/gift: {friend} was ill and needed strength, so {hero} [gave {friend.him} half of everything|gave up {hero.his} own
 share for {friend.him}].
when theft: "{friend} would not do that," said {hero}. "Let us look for facts."
when theft: {hero} found crumbs on the floor and followed them through the {deck}. {deck.sight}.
when theft: At the end of the trail sat a {creature} with {creature.look}. It [had eaten it all|was sleeping beside
 the wrapper].
when theft: "I am sorry, {friend}," said {rival}. "[I accept|Forgotten]," said {friend}.
when gift: "And what will you eat?" asked {friend}. "I am not so hungry," said {hero}, but {hero.his} stomach growled.
when gift: {captain} saw it and said nothing, but the next day there was {snack} on {hero}'s plate.

At last a light came around {world}. "[Ship ahoy|There it is]!" cried {hero}.
/ A solar storm had [bent its antenna|slowed it down], and [that was why the ship was late|that had cost {sum.part}
 days].
/ The pilot had stopped to help a [tug|freighter] with a broken engine, and [that was why the ship was late|that had
 cost {sum.part} days].
They unloaded {crate.need} for the {crate.owner}, {crate2.need} for the {crate2.owner}, and food for all.
? <night> there was a feast, and nobody had to count [boxes|spoonfuls].
/ <hero_high>
/ {hero} ate until {hero.his} belt [was too tight|creaked], and then {hero.he} ate {snack2}.
""",
    "no gravity": """
<opening>
[Suddenly|With a clunk] the great wheel of the {station} stopped turning, and everything [began to float|lost its
 weight].
/ Up went {clutter}, {clutter2} and {snack}.
/ {friend} had just poured tea. Now the tea hung in the air as a [wobbling|shining] ball.
{hero} and {friend} floated up to the ceiling, and down was the same as up.
? "[I feel sick.|Which way is the floor?|Where is down?]" said {friend}. "Hold my hand," said {hero}.

The wheel had stopped because {spin.cause}.
"Somebody must [get|bring] {spin} the {spin.post}," said {captain} over the radio. "But {spin.he} is in the
 {spin.room}, and the lift is dead."
/ {hero} pushed off too hard and bumped into the wall. In space you must push gently.
/ {hero} kicked with {hero.his} legs like a swimmer, but without a wall to push against {hero.he} got nowhere.
? <ponder>
Then {hero} had an idea: {hero.he} threw {hero.his} boot backward and drifted forward. <through>
"[There you are|Finally]!" said {spin}. {spin.He} took the {spin.tool}, and together they flew to the axle, where
 {spin.he} {spin.cure}.

[Slowly|With a groan|Inch by inch] the [great |]wheel began to turn. What had gone up now came down[, boots and all|
 with a crash|, piece by piece].
/ Last of all {clutter3} landed on {captain}'s head, and {captain} [laughed|blinked].
/ It took {sum.part} cadets to tidy up, and then {sum.more} more came to help, {sum.total} in all.
? "Push one way and you go the other way," said {hero}. "That is [the law|how rockets fly]."
<hero_high>
""",
    "repair duty": """
<opening>
On the duty list {hero} read: {officer.item}. [The|It was clear that the] {officer.item} {officer.fault}.
? "Perhaps {patchwork} will do," said {friend}. It did not, and [made things worse|stuck to everything].
"Who knows about such things?" asked {hero}. "The {officer.post}," said {friend}. "[Let us|We should] ask {officer}."

<through>
? [<detail>|<hum>]
In the {officer.room} {officer} the {officer.post} was [drinking cocoa|filling in a form]. "Your {officer.item}? What
 does it do?" {officer.he} asked.
"It {officer.fault}," said {hero}. "Then bring the {officer.tool}," said {officer}, "and [watch|learn]."
{officer} [looked|felt] inside. It was simple: {officer.cause}.
/ "Here," said {officer}, and {hero} held the lamp while {officer.he} {officer.cure}.
/ {hero} passed the {officer.tool}, and {officer} {officer.cure}.
? It took {sum.total} minutes, {sum.part} to find the fault and {sum.more} to [mend|cure] it.

Now the {officer.item} worked [again|as it should].
/ "Find the cause first," said {officer}. "[Then|After that] the rest is easy."
/ "Which tool was it?" {captain} asked later. "The {officer.tool}," said {hero}, "and it takes a {officer.post}."
/ {hero} ticked the {officer.item} off the list and ate {snack}.
? <hero_high>
""",
    "games": """
At the [great|yearly] games of {fest}, the cadets of the {station} played {sport}. You had to {sport.way}, and the
 winner got {sport.prize}.
{hero}, {rival} and {friend} were in the final. {rival} had won {sum.part} times before, and {hero} had won {sum.more}.
? {hero}, who {trait.habit}, had trained {deck.on} [before every shift|in secret].
? "Try not to cry when you lose," said {rival}. "Try not to [sneeze|blink]," said {hero}.
? [<detail>|<hum>]
{captain} blew the horn, and they were off.

/ At once {rival} was in front, and {hero} was [close|far] behind.
/ Side by side they went, and the crowd [roared|held its breath].
Then {rival} {sport.slip}. {rival.He} [was drifting|hung in the air], out of reach of [everything|every rail], and
 [looked scared|waved both arms|called for help].
/help: {hero} saw the finish, and {hero} saw {rival}. {hero.He} turned around and [held|stretched] out a hand.
/late: {hero} did not notice and went on, and only at the finish did {hero.he} turn around.
when help: "Why did you stop?" asked {rival}. "Because you needed a hand," said {hero}.
when help: Meanwhile {friend} came from behind and won {sport.prize}.
when late: {hero} had won! But {rival} still hung there, so {hero} went back and pulled {rival.him} in.

when help: {captain} shook {hero}'s hand. "The prize is for the fastest," said {captain}, "and my respect is for you."
when late: "You came back for me," said {rival}. "[Of course|Always]," said {hero}. "Cadets stick together."
/ {rival} has not [boasted|teased] since, and now they train as a team.
/ <night> {hero} and {rival} split {snack}, one half each.
? <hero_high>
""",
    "stowaway": """
<opening>
While unpacking a crate {deck.on}, {hero} heard something. It {creature.cry}. Under the [lid|packing foam] sat a
 {creature} with {creature.look}!
? It was no bigger than a [thumb|teacup], and it shivered.
"You are [far from home|lost]," said {hero}. "Where do you belong?"

{hero} did not know what it ate. {hero.He} offered {snack}, but it [turned away|would not touch it].
/ Then {friend} tried {creature.food}, and it [ate and ate|finished every bit].
/ In the archive {friend} [found|read] a page about the {creature}. It liked {creature.food}, said the page, and so it
 did.
? {rival} wanted to keep it in a jar. "It is not a toy," said {hero}.
/sad: But [day by day|shift by shift] it grew [weaker|thinner|paler]. It missed its home, and {hero} missed its
 [song|chatter].
/wild: But day by day it grew livelier, and at night it {creature.cry} so loudly that no one could sleep.
? <hero_low>
"It must go home," said {hero}, although [that was hard to say|{hero.he} loved it already]. Its home, said the
 archive, was {creature.home}.
{captain} lent them the {hue} shuttle, and {friend} [set the course|read the chart].
? [<detail>|<hum>]

{hero} set the {creature} down very gently. It [looked back once|touched {hero.his} glove], {creature.cry}, and was
 gone.
when sad: Out there many others {creature.cry} in answer, and it was not alone any more.
when wild: On the {station} it was quiet again, and that night {hero} almost missed the noise.
/ "Are you sad?" asked {friend}. "[A little|Yes]," said {hero}, "but it is happy."
/ {hero} kept a drawing of it over {hero.his} bunk.
/ Every year {hero} sent {creature.food} to {creature.home}, as a greeting.
""",
    "mixed crates": """
{sum.total} crates stood {deck.on}, {sum.part} on the left and {sum.more} on the right. It was {hero}'s task to bring
 each one to its owner.
? {hero} was a {trait} cadet who {trait.habit}.
But [a pipe had dripped on them|the labels had come off|the ink had faded], and [the words could not be read|nobody
 could read the words].

/ {hero} guessed. The first crate went to the {crate.owner}, who opened it and found {crate2.need}. "[That is not
 mine|Wrong]!"
/ "Just give them out," said {rival}. But when the {crate.owner} opened one, there were {crate2.need} in it.
? <hero_low>
"Look," said {friend}. "There are [little|tiny] pictures on [the lids|every lid]!" [So there were|It was true].
<ponder>
"{crate.label} must mean {crate.need}," said {hero}, "and the {crate.owner} needs {crate.need}."
"Then {crate2.label} is for the {crate2.owner}," said {friend}, "who is waiting for {crate2.need}."
? "And {crate3.label}?" "That is easy. The {crate3.owner} gets {crate3.need}."

So they carried {crate.need} to the {crate.owner} and {crate2.need} to the {crate2.owner}.
? [<detail>|<hum>]
<later> {sum.part} crates were gone, and {sum.more} {sum.were} left. [At last there were none|Soon the deck was
 clear|Then those were gone too].
/ "[Not one mistake|Perfect]," said {captain}. "How did you do it?" "We looked before we carried," said {hero}.
/ The {crate.owner} gave them {snack}, and the {crate2.owner} gave them [a smile|a salute].
? <hero_high>
""",
    "crystal cave": """
{hero} and {friend} [climbed|roped down] into a cave on a moon {world.sky}. At every turn they put down a {hue}
 marker, first {sum.part} and then {sum.more} more.
? "Why so many?" asked {friend}. "So that we [find the way back|do not get lost]," said {hero}, who {trait.habit}.
? <detail>
Deep inside, the walls were {gem.hue}. It was {gem}! It {gem.trait}.

/dark: Then {friend}'s lamp went out, and {hero}'s lamp [grew dim|flickered].
/fall: Then the ground shook, and dust [filled the air|hid everything].
"I cannot see the entrance," said {friend}, and {friend.his} voice [trembled|was thin].
? <hero_low>
"How many markers did we put down?" asked {hero}. "{sum.part} and {sum.more}," said {friend}. "That is {sum.total}."
when dark: They felt along the wall with their gloves, and {hero} found the last marker, number {sum.total}.
when fall: When the dust had settled a little, {hero} saw something {hue}. It was marker number {sum.total}.
They went from marker to marker and counted backward: {sum.total}, and so on, down to two and one.
? {friend} wanted to run, but {hero} held {friend.him} back. "[Slowly|One at a time]."
After number one they saw {world} in the sky, {world.look}.

/ In {hero}'s pocket was a small piece of {gem}. It was {gem.hue} and it {gem.trait}.
/ "I will never laugh at markers again," said {friend}.
/ They left the markers there, for whoever comes next.
<hero_high>
""",
    "lost gadget": """
<opening>
{hero} [never went anywhere without|was proud of] a {hue} {gadget} with {gadget.mark}. With it {hero.he} liked to
 {gadget.use}.
But after [the drill|the gym|breakfast] the {gadget} was gone. In space a thing that is not tied down [drifts|floats
 away].
? <hero_low>

"When did you have it last?" asked {friend}. "{deck.on}," said {hero}.
So they [went back|floated back there|turned around at once]. {deck.sight}, and they found {clutter} and {clutter2},
 but no {gadget}.
<ponder>
/ "Air moves from the fans to the filter," said {friend}. "So loose things do too."
/ "What floats goes where the air goes," said {hero}.
They [went|flew|hurried] to the [great|main] air filter [at the end of the hall|below the {deck2}]. On the grid hung
 {clutter3}, and beside it something {hue}.
It was the {gadget} with {gadget.mark}!
? {rival} was there too. "My [cap|pen] was in the filter last week," said {rival}. "Everything ends up here."

/ {hero} tied a string to the {gadget}, and the other end to {hero.his} belt.
/ "Now let us {gadget.use}," said {friend}, and they did so until the last bell.
/ {hero} let {friend} use the {hue} {gadget} for [a whole day|one shift].
<hero_high>
""",
    "quiz": """
[During the long watch|On the way to the next moon|While the shuttle was fuelling] {hero} and {friend} asked each
 other questions.
? [<detail>|<hum>]
"Who uses a {officer.tool}?" asked {hero}. "The {officer.post}," said {friend}. "That is {officer}."
"Where do you find {expert}?" "In the {expert.room}," said {hero}, "because {expert.he} is the {expert.post}."
? "I see a planet {world.look}. Which one is it?" asked {friend}. "{world}," said {hero}.
"What colour is {gem}?" "{gem.hue}," said {friend} [at once|without looking up|and yawned].
? "What is the opposite of {contrary}?" "{contrary.back}," said {hero} [with a yawn|quickly|and grinned].
"{sum.total} minus {sum.more}?" asked {hero}.
/right: "{sum.part}," said {friend} [at once|after a moment].
/wrong: "{sum.total}?" said {friend}. "[Count again|Think again]," said {hero}. "{sum.part} it is, then," said {friend}.
? "And {sum.part} plus {sum.more}?" "{sum.total} again," said {friend}. "You cannot trick me."

when right: "You should be [a captain|an officer] already," said {hero}, and [gave {friend.him}|handed over] {snack}.
when wrong: "[Nobody knows everything|Now you know]," said {hero}, and they shared {snack}.
? {world} [rose|glided past] outside, {world.look}, and the watch was over [before they knew it|too soon].
""",
}
