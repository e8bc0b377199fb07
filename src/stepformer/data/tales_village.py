"""The dialect "village": mud, markets, menders and lost lambs. The notation is explained in `tales`."""

from __future__ import annotations

from stepformer.data.tales_village_words import ROLES, TABLES

__all__ = ["PLOTS", "ROLES", "RULES", "TABLES"]

RULES = {
    "opening": """
One {season.air} morning in {season}, {season.sign}. A {trait} {hero.child} named {hero} [was up before the
 rooster|could hardly wait to go outside|ate breakfast in a hurry|sat on the doorstep and pulled on two warm socks].
In the village of {village} there [lived|was] a {trait} {hero.child} called {hero}, who {trait.habit}.
It was {season} in {village}, and {season.sign}. {hero}, who lived {home}, [woke in a <fine> mood|got up at sunrise].
{hero} was a {trait} {hero.child} who lived {home}. Everyone knew that {hero} {trait.habit}.
[Not long ago|Once], {home} in {village}, there lived a {hero.child} named {hero}. {hero.He} {trait.habit}.
The sun rose over {village}. It was {season}, and {season.sign}. {hero} opened the window and [took a deep
 breath|listened to the cuckoo|waved to the milkman].
""",
    "hero_sad": """
{hero} [blinked back tears|felt a lump in {hero.his} throat|hung {hero.his} head|could have cried].
{hero}'s heart [sank like a stone|felt as heavy as lead].
{hero} sat down on [a stone|a log|the ground] and sighed.
It was [a miserable|a gloomy|an unhappy] moment, and {hero}'s chin [trembled|began to shake].
""",
    "hero_glad": """
{hero} [grinned from ear to ear|laughed out loud|hopped on one foot for joy|clapped {hero.his} hands].
{hero}'s cheeks glowed [with joy|like two ripe apples].
{hero} was so [happy|glad|pleased] that {hero.he} [sang out loud|danced a little jig|hugged everybody twice].
{hero} felt [as light as thistledown|warm from head to toe|like the luckiest {hero.child} in {village}].
""",
    "think": """
{hero} scratched {hero.his} head and thought [hard|for a while|about it].
{hero} looked at the sky, then at the ground, and thought.
{hero} [bit {hero.his} lip|closed {hero.his} eyes|counted to ten] and tried to think.
""",
    "friend_offers": """
"[Two heads are better than one|Four hands work faster than two]," said {friend}. "I will [come with you|help you]."
"[Do not worry|Cheer up|Never mind]," said {friend}. "We will [do it|manage it] together."
"I have [nothing else to do|the whole day free]," said {friend}. "Let me help."
""",
    "thanks_elder": """
"Thank you, {elder}!" said {hero}. "[You are welcome|It was nothing|Any time]," said the {elder.trade}.
"How can I thank you?" asked {hero}. "[Just pass the kindness on|A smile is enough]," said {elder}.
{hero} thanked {elder} [three times|with all {hero.his} heart|and shook {elder.his} big rough hand].
""",
    "greet_elder": """
{elder} the {elder.trade} was [outside the {elder.shop}|sitting by the {elder.shop}|busy in the {elder.shop}].
They passed the {elder.shop}, where {elder} the {elder.trade} was [resting|whistling|drinking tea].
[Just then|By chance] {elder} the {elder.trade} came out of the {elder.shop} with a {elder.tool} in {elder.his} hand.
""",
    "at_place": """
[First|To begin with,] they [went|ran|walked] to the {place}. {place.sight}
They hurried to the {place}. {place.sight}
They searched every corner of the {place}. {place.sight}
""",
    "sleep": """
That night {hero} slept [soundly|like a dormouse|without a single bad dream].
{hero} fell asleep [smiling|before {hero.his} head touched the pillow|with the window open].
That night {hero} lay in bed and [listened to the owls|counted the stars|thought about the day] until sleep came.
""",
    "air": """
[Somewhere|Far off] a [cow lowed|bell rang|door slammed|cart rattled|dog barked], and the air smelled of
 [smoke|rain|fresh bread|cut grass|cider|warm hay].
A [robin|blackbird|thrush|wagtail] [sang|hopped about|scolded] on [the fence|a gatepost|the thatch|an old plough].
The [baker's wife|postman|chimney sweep|goose herd] [hurried|limped|strolled] by with [a heavy sack|a long ladder|two
 pails|an armful of hay] and [nodded|called good day|did not even look up].
""",
    "detail": """
{friend} had a {colour2} [scarf|jacket|bonnet|pinafore] on and [hummed a tune|chewed a straw|kicked a pebble along].
{friend}, who {trait2.habit}, was [unusually quiet|as busy as a bee|full of plans] that day.
In {friend}'s pocket there was {junk3}, [for luck|as always|just in case].
""",
    "passed": """
The way led past the {place}. {place.sight}.
{hero} took the path by the {place}. {place.sight}.
On the way {hero} stopped {place.at} to rest. {place.sight}.
It was not far, only past the {place} and [over a stile|up a short hill|around two corners].
""",
}

PLOTS = {
    "lost treasure": """
<opening>
{hero} owned a {colour} {treasure} with {treasure.mark}, [a gift from {hero.his} {kin}|which {hero.his} {kin} had
 made]. [More than anything|Every day] {hero.he} liked to {treasure.joy}.

But [that day|one morning] the {treasure} was [gone|missing|nowhere to be found].
{hero} looked [under the bed|in the cupboard|behind the stove] and found only {junk} and {junk2}.
? <hero_sad>
"Have you seen my {colour} {treasure}?" {hero} asked {friend}. "No," said {friend}, [shaking {friend.his}
 head|frowning].
<friend_offers>
? [<detail>|<air>]

<at_place>, but there was no {treasure} {place.at}.
? <greet_elder> "[Look down, not up|Thieves leave tracks|Go slowly and look for a clue]," said {elder}.
<noon> {friend} [stopped and pointed|gave a shout|knelt down]. "[Look|See here], {loss.clue}!"
It led them on until they looked {loss.where}. And there was the {treasure}: {loss.thief}!
/ {hero} {loss.fetch}. It was still {colour}, and it still had {treasure.mark}.
/ {hero} {loss.fetch}. [Nothing was broken|It was dusty but whole], {treasure.mark} and all.

<hero_glad>
/ "Now you may play with it too," {hero} told {friend}, for [a friend who helps is a friend to share with|that was
 fair].
/ <dusk> {hero} and {friend} went out together to {treasure.joy}.
/ From then on {hero} put the {colour} {treasure} away every night, and it was never lost again.
? <sleep>
""",
    "mending": """
<opening>
That morning {hero} saw that the {mender.item} {mender.fault}, because {mender.cause}.
? "Oh dear," said {hero.his} {kin}. "We need it [today|before Sunday|more than ever]."

/ First {hero} tried to mend the {mender.item} with {wrong}. It held for [a minute|a moment], and then it [came
 loose|gave way|was as bad as before].
/ "I can fix that myself," said {hero}, and took {wrong}. But {wrong} was no use at all for a {mender.item}.
? <hero_sad>
"For a broken {mender.item} you want the {mender.trade}," said {friend}, who [happened to come by|lived next door].
 "Go and see {mender}."

So {hero} set off for the {mender.shop}. <passed>
{mender} [listened with one hand behind {mender.his} ear|put on {mender.his} spectacles|nodded slowly]. "[Let me see
 it|Show me]," {mender.he} said. "[Ah, this needs|All we need is] a {mender.tool}."
{mender} took the {mender.tool} from [the wall|a hook|the bench] and set to work. {mender.He} {mender.cure}.
? "May I try?" asked {hero}. {mender} guided {hero.his} hand, and the {mender.tool} felt [heavy|strange|warm] in it.

"What do I owe you?" asked {hero}.
/ "Bring me {pay}," said {mender}, so {hero} ran home and came back with {pay}.
/ "Sweep the {mender.shop} for me," said {mender}, so {hero} swept until the floor shone.
/ "Nothing at all," said {mender}, "but [show|teach] somebody else what you learned."
/ "{sum.part} pennies," said {mender}. {hero} had {sum.total}, so {hero.he} paid {sum.part} and kept {sum.more}.
<dusk> the {mender.item} was as good as new.
/ {hero.His} {kin} [smiled and nodded|could not see where it had been broken].
/ Now {hero} knew: the {mender.trade} uses a {mender.tool}, and {wrong} will not do.
/ <hero_glad>
""",
    "market cart": """
[On market day|One Saturday|Before the autumn fair] {hero} and {hero.his} {kin} loaded the cart. They put in
 {sum.part} baskets of {crop} and {sum.more} of {crop2}, so there were {sum.total} baskets in all.
? The {crop} were {crop.hue} and the {crop2} were {crop2.hue}. [Not one was bruised|They looked good enough to eat].
"[Walk on|Off we go]!" called {hero}, and the pony [set off|shook its mane and pulled].
? <air>

But {rescuer.cause}, and so {rescuer.effect}.
"[Oh no!|What now?|Goodness!]" cried {hero}. "We will [never get to market|be late]."
{rescuer.fail}.
? <hero_sad>
? <think>
[Luckily|After a while|Just then] {rescuer} the {rescuer.trade} came [along the road|by|around the bend]. "I know what
 you need," {rescuer.he} said, and went to fetch {rescuer.need}.
{rescuer.cure}.
/ "Take these {crop} for your trouble," said {hero}, and {rescuer} filled {rescuer.his} pockets.
/ {hero} thanked {rescuer} and gave {rescuer.him} the biggest {crop.one} of all.
/ "I will not forget this, {rescuer}," said {hero}.

<noon> they [came to the market at last|reached the market square], where people [crowded around the cart|were waiting].
/some: They sold {sum.part} of the {sum.total} baskets, and {sum.more} {sum.were} left over.
/all: They sold all {sum.total} baskets, and [the cart was empty|not one was left].
? With the first coins {hero.his} {kin} bought {wish} for {hero}.
when some: {hero} gave what was left to {friend}, [who liked {crop2} in any form|whose family loved {crop2} more than
 cake]. That made a fine {crop2.dish}.
when all: {hero} rode home lying in the empty cart and looked up at the clouds.
? "[The right tool is half the work|A helper on the road is worth a purse of gold]," said {hero.his} {kin}.
""",
    "trading chain": """
<opening>
{hero} wanted to bake a {bake} for {occasion}, but the {chain.want} had [run out|all been used up].
So {hero.he} [took a basket and went|ran] to the {chain.owner}. "May I have some {chain.want}, please?"
"[Gladly|With pleasure|Yes]," said the {chain.owner}, "if you bring me {chain.swap}. I [need it badly|have none left]."

{hero} had no such thing, so {hero.he} went to the {chain.maker}. <passed>
? <air>
"May I have {chain.swap}?" asked {hero}. "You may," said the {chain.maker}, "if you {chain.chore} for me."
/ {hero} rolled up {hero.his} sleeves and got to work. {chain.done}.
/ That was [hard|slow|dull] work, but {hero.his} friend {friend} came to help. {chain.done}.
? {hero}'s arms ached, but {hero.he} did not stop until it was done.
"[Well done|A bargain is a bargain]," said the {chain.maker}, and gave {hero} {chain.swap}.

{hero} carried it to the {chain.owner}, who was [delighted|very pleased] and filled the basket with {chain.want}.
Now {hero} could begin. {hero.He} [mixed and stirred|measured and kneaded] and put the {bake} into the oven.
? The smell [drifted out of the window|crept under the door] and [along the lane|across the yard], and even the cat
 [sat up|came running].
/ At {occasion} the first slice went to the {chain.owner} and the second to the {chain.maker}.
/ At {occasion} everyone asked for more of the {bake}, and [only crumbs were left|soon the plate was empty].
/ {hero} cut the {bake} into {sum.total} pieces. {sum.part} were eaten at once, and {sum.more} {sum.were} saved for
 later.
? "It took [half the|a whole] village to bake it," said {hero}.
<hero_glad>
""",
    "stray animal": """
<opening>
[At dawn|After breakfast] {hero} [found the gate open|saw a gap in the fence], and the youngest {stray} was gone.
 Yesterday there had been {next.after} animals in the yard. Now there were only {next}.
? "It has never been out alone," said {hero.his} {kin}, [and looked worried|twisting {kin.his} apron].
"[I will bring it back|I will find it]," said {hero}, and took {stray.food} along, for [any|every] {stray} likes that.

? <air>
/ {hero} called and called {place.at}, but [nobody answered|only an echo answered]. {place.sight}.
/ First {hero} went the wrong way, to the {place}. {place.sight}, but no {stray} was there.
? <hero_sad>
Then {hero.he} noticed {stray.tracks}, and [followed the trail|went that way|hurried after the trail].
/storm: [Dark clouds rolled in|The sky turned black], and soon it was raining hard.
/calm: The path grew [narrow|steep|wild], but {hero} [kept going|did not turn back].
At last something {stray.sound}. There was the {stray}, {stray.where}! It could not get out, because {stray.stuck}.

/alone: {hero} held out {stray.food} and spoke softly. The {stray} [stopped trembling|grew calm|sniffed at it].
/help: {hero} could not do it alone, so {hero.he} ran to {elder} the {elder.trade}, who came at once with a rope.
when alone: Then {hero.he} [worked slowly|went carefully], a little at a time, until the {stray} was free.
when help: {hero} tied the rope, {elder} pulled, and together they brought the {stray} to safety.
? The {stray} {stray.sound} again, and this time it sounded like thank you.
when storm: Both of them were soaked, so {hero} wrapped the {stray} in {hero.his} coat and carried it home.
when calm: {hero} walked home with the {stray} [at {hero.his} heels|close by {hero.his} side].
<dusk> {hero.his} {kin} [shut the gate with a strong bolt|mended the fence], and the {stray} had {stray.food} for
 supper.
? <sleep>
""",
    "quarrel": """
<opening>
{hero} and {friend} were [best friends|always together], although {hero} {opposite.one} and {friend} {opposite.other}.
[One afternoon|After school] they found a {colour} {treasure} with {treasure.mark} lying {place.at}. {place.sight}.
? [<detail>|<air>]

"I saw it first!" said {hero}. "But I picked it up!" said {friend}.
/ They pulled at it from both sides until [their faces were red|it almost broke].
/ Each of them [shouted louder than the other|said something unkind].
/kept: In the end {hero} ran home with the {treasure}, and {friend} [stamped off|went away without a word].
/left: In the end {friend} ran home with the {treasure}, and {hero} [kicked a stone|stood there alone].
when kept: {hero} tried to {treasure.joy}, but alone it was no fun at all.
when left: {hero} had never liked being alone, and now the afternoon seemed [endless|as long as a week].
? <hero_sad>

<dusk> {elder} the {elder.trade} knocked at the door. "I have lost a {colour} {treasure}," {elder.he} said. "It has
 {treasure.mark}, and [I made it for my niece|I have owned it since I was small]. Have you seen it?"
when kept: {hero} turned red and gave the {treasure} back. It had never been {hero.his} own.
when left: {hero} took {elder} to {friend}'s house, and {friend} turned red and gave the {treasure} back.
? "[Honest hands are better than quick ones|What is found is not always yours]," said {elder}, [smiling|not unkindly].
So it belonged to neither {hero} nor {friend}, and the quarrel had been [about nothing|silly].
"I am sorry," said {hero}. "I am sorry too," said {friend}.
/ {elder} let them borrow the {treasure}, {hero} on [Mondays|Tuesdays] and {friend} on [Thursdays|Fridays].
/ Then they shook hands and shared {pay} on the wall, half for {hero} and half for {friend}.
/ "Come to the {elder.shop} tomorrow," said {elder}, "and I will help you make [one|a {treasure}] for the two of you."
? From that day they [never fought over such a thing again|asked first and grabbed later].
""",
    "night noise": """
It was a [stormy|moonless|windy|cold and dark] night in {village}. {hero}, a {trait} {hero.child} who lived {home},
 was [almost asleep|reading by a candle|counting sheep] when {hero.he} heard {noise.sound}.
? The house was [quiet|still], and everybody else [was asleep|was snoring].
[What could it be?|There it was again!|Who was out there at this hour?|At first {hero.he} thought it was a dream.]
 {hero} [pulled the blanket up|sat up straight|held {hero.his} breath].
"Perhaps it is {noise.guess}," {hero.he} [whispered|thought], and {hero.his} heart [beat like a drum|thumped].

/friend: {friend}, who was staying the night, woke up too. "I hear it," said {friend}. "[Shall we look?|What is it?]"
/kin: {hero} crept to {hero.his} {kin}. "I heard {noise.guess}!" said {hero}. "Then take the lamp, and we will look,"
 said {hero.his} {kin}.
/alone: {hero} was [frightened|afraid], but not knowing was worse. {hero.He} lit the {colour} lantern.
when friend: They lit the {colour} lantern and held hands.
when kin: {hero} carried the {colour} lantern, and {hero.his} {kin} walked close behind.
when alone: "Be brave," {hero.he} told {hero.himself}.
[One step, two steps, three steps|Step by step]. The floor [creaked|was cold|felt rough] under bare feet[| and the
 shadows danced].
The noise came from {noise.where}. {hero} lifted the lantern and looked.
It was not {noise.guess} at all. It was only {noise.truth}!

<hero_glad>
when friend: {friend} laughed until {friend.he} had to sit down.
when kin: "You see," said {hero.his} {kin}, "in the light most monsters [are small|shrink]."
when alone: All at once {hero.he} was not afraid any more.
Then {hero} {noise.remedy}, and [the night was quiet|there was peace again|the house lay still].
? {hero} went back to bed and slept [like a dormouse|until the rooster crowed|without a single bad dream].
? In the morning {hero} told the story at breakfast, and each time {noise.guess} grew bigger.
/ Ever since, when {hero} hears {noise.sound}, {hero.he} [only smiles|remembers {noise.truth}].
/ [Fear is big in the dark|A thing in the dark has a big shadow], {hero} thought, but it is small in the light.
""",
    "garden": """
In spring {hero}, who lived {home}, [dug|raked] a garden bed behind the house. {hero.He} sowed {sum.part} rows of
 {crop}, and then {sum.more} more, so there were {sum.total} rows.
? {hero} was a {trait} {hero.child} and {trait.habit}.
"When will they grow?" {hero} asked {hero.his} {kin}. "[Give them water and time|When they are ready|Not before
 {friend} has learned to sit still]," said {hero.his} {kin}.
Soon little green shoots came up, and {hero} [showed them to {friend}|called {friend} to look]. Every day they were a
 little taller.

/dry: But the summer was [dry|hot and dry]. No rain fell for [weeks|a month|{sum.total} weeks], so the soil cracked
 and the leaves drooped.
/pest: But one night {pest} came and {pest.damage}.
<hero_sad>
when dry: {hero} poured out one cup of water, but the thirsty ground swallowed it [at once|and was dry again].
when pest: {hero} shouted and waved a broom, but [the next night they came back|the {pest} did not mind].
? <think>
when dry: "Carry water in the evening, when the sun is low," said {elder} the {elder.trade}. "At noon it dries too
 fast."
when pest: "Shouting will not help," said {elder} the {elder.trade}. "What you need is {pest.guard}."
when dry: So every evening {hero} and {friend} carried buckets from the well, and slowly the leaves stood up again.
when pest: So {hero} and {friend} made {pest.guard}, and sure enough, {pest.result}.

In autumn the {crop} were [ripe|ready] at last, fat and {crop.hue}.
/ {hero} filled {sum.total} baskets, one from every row. {sum.more} went to {elder}, and {sum.part} {hero} kept.
/ {hero} gave the biggest {crop.one} to {elder}, who [had known what to do|had given such good advice].
/meal: {hero}'s {kin} cooked {crop.dish} from them, and {friend} and {elder} came to supper.
when meal: It was the best meal {hero} had ever eaten, because {hero.he} had [grown it|waited so long for it].
? "[Water and patience|Good advice and hard work]," said {hero}, "that is all a garden needs."
""",
    "race": """
On the morning of {occasion} all the children of {village} [gathered|met] {game.where} for the {game}. You had to
 {game.way}, and the prize was {game.prize}.
{hero}, {rival} and {friend} stood at the line. {hero} had practised for {sum.part} days. {rival} had practised for
 {sum.more}, but {rival} {edge.one} and {hero} {edge.other}.
? "I [always win|cannot lose]," said {rival}. "We shall see," said {hero}.
? {hero}'s hands were [damp|shaking], because {hero.he} [wanted so much to win|had never been in a race before].
? <air>
"Ready, steady, go!" called {elder} the {elder.trade}.

At first {rival} was ahead and {hero} was behind. Then, halfway, {rival} {game.slip}.
/stop: {hero} could have [hurried past|gone on]. But {rival} looked so [unhappy|miserable] that {hero} stopped.
/win: {hero} went past, looked back once, and [crossed the line|came in] first.
when stop: "Are you hurt?" asked {hero}. "Only [a little|my pride]," said {rival}. {hero} helped {rival.him} up.
when stop: {friend} passed them both and won, and {hero} and {rival} came in last, [arm in arm|side by side, laughing].
when win: People cheered, and {elder} handed {hero.him} {game.prize}. But {rival} sat on the ground and [wept|sulked].
? <hero_glad>

when stop: {friend} took {game.prize} home, but {elder} gave {hero} {pay}. "That is for the kindest," said {elder}.
when win: {hero} went over and sat down too. "You were ahead of me until then," said {hero}. "Let us share the prize."
when win: {rival} [wiped {rival.his} nose|looked up]. "Really?" "Really," said {hero}.
/ <dusk> {hero} and {rival} were no longer rivals but friends.
/ Next year, they agreed, they would [train together|enter as a pair].
/ "Winning is nice," said {hero.his} {kin}, "but [a new friend lasts longer|being kind is nicer]."
""",
    "secret gift": """
The birthday of {hero}'s {kin} was {sum.total} days away, and {hero} [had an idea|made a plan]. {hero.He} would make a
 {gift}.
? {hero} {trait.habit}, but above all {hero.he} was good at keeping secrets.
For that {hero.he} needed {gift.stuff}. {elder} the {elder.trade} let {hero} have some in return for {pay}.

Every evening {hero} [sat by the candle|worked in secret|bent over the table]. {hero.He} {gift.step}.
/ On the first day it went wrong, and {hero} [had to start again|pricked {hero.his} thumb]. <hero_sad>
/ It was [slow|fiddly|tricky] work, and twice {hero} wanted to give up.
? "Do not hurry," said {friend}, the only one who knew. "[Slow is smooth|You still have time]."
After {sum.part} days the {gift} was nearly done, and {sum.more} more {sum.were} left before the birthday.
/near: Then [footsteps came down the hall|the door creaked|somebody coughed on the stairs]! {hero} pushed the {gift}
 out of sight {gift.hide}.
/ {hero} hid it {gift.hide}, where [nobody ever looked|no one would search].
when near: "What are you doing?" asked {hero.his} {kin}. "Oh, [nothing that bites|only tidying]," said {hero}, and
 blushed.
when near: {hero.His} {kin} looked [puzzled|curious] but went away again.

[At last the birthday came|Then it was the birthday|The great day came, with rain at the window|The birthday was a
 {season.air} day]. {hero} fetched the {gift} from its place {gift.hide} and wrapped it in {colour} paper.
{hero.His} {kin} untied the string [slowly|with great care]. "A {gift}! Did you make this [yourself|with your own
 hands]?"
"[Yes|I did]," said {hero}, "from {gift.stuff}."
/ {hero.His} {kin} said nothing for a while and then hugged {hero.him} [hard|for a long time].
/ "It is the finest present [of all|I ever had]," said {hero.his} {kin}.
<hero_glad>
? From then on the {gift} was used every day, and the {colour} paper was [kept in a drawer|saved too].
""",
    "newcomer": """
A new family moved to {village} and made their home {home}. They had a {friend.child} called {friend}.
[For three days|At first] {friend} only looked out of the window. {friend.He} was [lonely|homesick|sad] and [did not
 dare to come out|missed {friend.his} old street].
/ {hero}, who {trait.habit}, [noticed it|saw the pale face behind the glass].
/ {hero}, a {trait} {hero.child} from the same lane, [was sorry for {friend.him}|wondered about it].
"[Maybe|Perhaps] {friend} does not like us," said {rival}. "Or maybe {friend.he} is [shy|afraid]," said {hero}.
? "Be a friend first," said {hero.his} {kin}, "and then you will have one."

So {hero} knocked at the door and held out {pay}. "[Welcome to {village}|This is for you]. Do you want to play
 {custom.ours}?"
{friend} [shook {friend.his} head|looked at {friend.his} shoes]. "I do not know that game," said {friend}. "At home we
 played {custom.yours}."
/ {hero} did not know {custom.yours}. The two of them [stood there|looked at each other], and neither [knew what to
 say|said a word].
/ "I have never heard of {custom.yours}," said {hero}. {friend} looked [sadder than before|ready to close the door].
? <think>
"Show me," said {hero} at last. So {friend} came out and began {custom.act}.
"But that is {custom.ours}!" cried {hero}. "It is the same game with another name!"

They both [laughed|burst out laughing], and then they went off to play {place.at}. {place.sight}.
? <air>
{hero} {opposite.one} and {friend} {opposite.other}, but [at {custom.ours} they were equal|that made no difference].
? {hero} won {sum.part} rounds and {friend} won {sum.more}, so they played {sum.total} rounds in all.
? Even {rival} joined in. "I was wrong about you," said {rival}. "[That is all right|Never mind]," said {friend}.
/ <dusk> {friend} did not want to go inside any more.
/ <dusk> {friend} told {friend.his} parents that {village} was not so bad after all.
/ From then on the game had two names in {village}, {custom.ours} and {custom.yours}.
<hero_glad>
""",
    "found purse": """
<opening>
[On the way to school|On an errand|Later, on a walk], {hero} saw something {colour} lying {place.at}. It was a
 purse[!|, fat and heavy.|, tied with a leather string.] {hero.He} counted the coins inside: {sum.part} silver ones
 and {sum.more} of copper, which made {sum.total}.
? {place.sight}, and [nobody else was there|there was no one to ask].
In the shop window {hero} had often seen {wish}. It cost {sum.part} coins. "I could buy it and still have {sum.more},"
 {hero} thought.

/ But the purse was not {hero.his} own. Somewhere, somebody was [searching every pocket|worrying].
/ "Nobody would know," {hero} thought. Then {hero.he} [shook {hero.his} head|felt hot]. "But I would know."
? "What would you do?" {hero} asked {friend}. "I would want mine back," said {friend}.
So {hero} [went from door to door|set out to find the owner]. At the {elder.shop} {hero.he} asked {elder} the
 {elder.trade}. "[It is not mine|Mine is here in my pocket]," said {elder}. "Try [next door|the {elder2.shop}]."
At the {elder2.shop} {elder2} the {elder2.trade} was [turning out drawers|looking under the bench]. "I have lost my
 purse!"
"What colour is it, and how many coins are in it?" asked {hero}, [to be sure|who was no fool]. "It is {colour}, with
 {sum.total} coins," said {elder2}. So it was {elder2.his} purse, and {hero} gave it back.

{elder2} was [overjoyed|so relieved that {elder2.he} had to sit down].
/ "That was for a new {elder2.tool}," said {elder2}. "Without it a {elder2.trade} [cannot work|is lost]."
/ "Most people would have kept it," said {elder2}. "Not most," said {hero}, "only some."
/ {elder2.He} gave {hero} {pay}, and {hero} shared it with {hero.his} {kin}.
/wish: The next week a parcel came for {hero}. In it was {wish}, and a note from {elder2}.
/ {hero} had no more money than before, but [felt rich|walked home with a light heart].
when wish: "[To an honest {hero.child}|With thanks]," said the note.
<hero_glad>
""",
    "riddles": """
[On a rainy afternoon|One evening|While the bread was baking] {hero} and {friend} sat [by the fire|in the
 kitchen|under the porch roof] and asked each other riddles.
? <detail>
? {hero} {opposite.one} and {friend} {opposite.other}, but both were good at guessing.
"Who works with a {mender.tool}?" asked {friend}. "The {mender.trade}," said {hero} [at once|without thinking]. "That
 is {mender}."
"And {elder}, what is {elder.his} trade?" "{elder} is [a|the] {elder.trade}," said {hero}, "with a {elder.tool}."
"What is the opposite of {contrary}?" asked {friend}. "{contrary.back}," said {hero}. "[Even a baby knows that|Too
 easy]."
"I have {sum.part} {crop} and you give me {sum.more}. How many have I got?" asked {hero}.
/right: {friend} counted on {friend.his} fingers. "{sum.total}!"
/wrong: "{sum.part}?" guessed {friend}. "No, {sum.total}," said {hero}, and laid them out on the table to count.
? "The last one," said {hero}. "When the {stray} is hungry, what does it want?" "{stray.food}," said {friend}.

when right: "[Right|Correct] every time," said {hero}. "[We are too clever for riddles|Now I need harder ones]."
when wrong: {friend} [laughed|groaned]. "I will never be [a grocer|a schoolteacher]," {friend.he} said.
<hero_glad>
""",
    "picking": """
<opening>
[That day|After breakfast] {hero} and {friend} took a {colour} basket and went to pick {berry}. <passed>
{hero} picked {sum.part} handfuls, and {friend} picked {sum.more}. Together that made {sum.total}.
? [<detail>|<air>]
/ate: But the {berry} were so [sweet|juicy] that the two of them [ate|nibbled] all the way home.
/fell: But {friend} [tripped over a root|stumbled], and the {colour} basket rolled down the bank.
when ate: When they came to the door, the {colour} basket was empty, and their mouths were [stained|sticky].
when fell: Every last one of the {berry} was gone. "I am so sorry," said {friend}, close to tears.
? <hero_sad>
when ate: "Where are the {berry} for my jam?" asked {hero.his} {kin}. "[In here|They got lost]," said {hero}, and
 pointed to {hero.his} stomach.
when fell: "You did not do it on purpose," said {hero}, and [put an arm around {friend.him}|wiped {friend.his} cheek].
/ So they went back and picked {sum.total} more, and this time they [walked home carefully|did not taste a single one].
/ "Tomorrow is another day," said {hero.his} {kin}, and gave them {pay} instead.
? <sleep>
""",
}
