"""The words of the dialect "village", in the notation explained in `tales`.

Some rows are facts of the village that hold in every story (who mends what with which tool, who trades what for what),
so that a model can learn them and be asked about them.
"""

from __future__ import annotations

ROLES = {"hero": "child", "friend": "child", "rival": "child", "elder": "mender", "elder2": "mender"}

TABLES = {
    "child": """
name ; he
Ada, Bess, Cora, Della, Elsie, Fern, Greta, Hattie, Ivy, Junia, Kitty, Lottie, Maud, Nell, Olive, Poppy, Rosie ; she
Sally, Tilda, Wilma, Clover, Dora, Hetty, Ida, Mabel, Peggy, Betony, Linnet, Effie, Sorrel, Wren, Jessamy ; she
Alfie, Barnaby, Colin, Dunstan, Edmund, Ferdy, Hugo, Ivor, Jasper, Kit, Milo, Ned, Oscar, Perkin, Quentin, Robin ; he
Sam, Toby, Wilf, Bertie, Cedric, Digby, Ewan, Hal, Jory, Rowan, Walter, Gregory, Tam, Osbert, Rafe ; he
""",
    "kin": """
name ; he
mother, grandmother, aunt, older sister ; she
father, grandfather, uncle, older brother ; he
""",
    "mender": """
name ; he ; trade ; shop ; tool ; item ; cause ; fault ; cure
Bram Oakley ; he ; carpenter ; timber yard ; mallet ; milking stool ; the cow had kicked it ; had lost a leg ; knocked
 a new leg firmly into the seat
Marta Fenn ; she ; cobbler ; boot shop ; awl ; left boot ; a sharp flint had cut it ; had a hole in the sole ;
 stitched a thick new sole to it
Jonah Pike ; he ; blacksmith ; forge ; hammer ; garden gate ; the bull had leaned on it ; hung crooked on its hinge ;
 heated the hinge until it glowed and beat it straight
Widow Tansy ; she ; seamstress ; sewing room ; needle ; winter coat ; a bramble had caught it ; was torn at the elbow
 ; sewed a neat patch over the tear
Peder Lock ; he ; clockmaker ; clock shop ; tiny screwdriver ; mantel clock ; dust had crept inside ; had stopped
 ticking ; cleaned every cog and tightened every screw
Hob Tilley ; he ; tinker ; wagon ; soldering iron ; tin kettle ; it had boiled dry on the stove ; leaked at the spout
 ; closed the leak with a bright drop of solder
Elsbeth Reed ; she ; weaver ; willow shed ; bodkin ; egg basket ; it had been filled far too full ; had a broken
 handle ; wove a new handle from green willow
Corin Vale ; he ; fiddle maker ; loft ; little clamp ; fiddle ; it had fallen off the shelf ; had split along the side
 ; glued the split and pressed it tight
Dame Harriet ; she ; saddler ; tack room ; leather punch ; bridle ; the pony had chewed it ; had a snapped strap ;
 punched three clean holes and buckled a fresh strap
Tobin Pane ; he ; glazier ; glass shed ; glass cutter ; kitchen window ; a hailstone had hit it ; had a long crack ;
 cut a clear new square of glass and puttied it in
Lettie Bell ; she ; bookbinder ; bindery ; paste brush ; storybook ; it had been left out in the dew ; was losing its
 pages ; pasted the pages back and pressed them flat
Otto Finch ; he ; wheelwright ; wheel yard ; drawknife ; wheelbarrow ; it had bumped down the quarry steps ; had a
 wobbly wheel ; shaved a new spoke and tapped it into the rim
Ruth Cooper ; she ; cooper ; barrel yard ; hoop driver ; rain barrel ; the frost had squeezed it ; dripped between its
 boards ; drove the iron hoops down until the boards were tight
Ansel Rook ; he ; toymaker ; toy shop ; winding hook ; music box ; somebody had wound it too hard ; would not play a
 note ; hooked the spring back into its notch
Nan Gully ; she ; netmaker ; boathouse ; shuttle ; fishing net ; a big pike had bitten through it ; was full of holes
 ; knotted fresh twine across every gap
Silas Moor ; he ; mason ; stone yard ; trowel ; chimney ; a gale had shaken it ; was missing three bricks ; laid three
 bricks in wet mortar
""",
    "rescuer": """
name ; he ; trade ; cause ; effect ; fail ; need ; cure
Bram Oakley ; he ; carpenter ; it had rained all night ; the lane was so muddy that the cart sank to its axle ; They
 pushed until their faces were red, but the wheels only sank deeper ; two stout planks ; They slid the planks under
 the wheels, and the cart rolled out onto firm ground
Gaffer Wood ; he ; woodcutter ; a gale had blown all night ; a fallen oak lay right across the road ; They tried to
 lift the trunk, but it was far too heavy ; a long saw ; They sawed the trunk in two and rolled the halves into the
 ditch
Mother Ashby ; she ; potter ; it had frozen hard in the night ; the hill was as slippery as glass ; The pony slid back
 at every step ; a bucket of ash from the kiln ; They sprinkled the ash over the ice, and the hooves could grip again
Jonah Pike ; he ; blacksmith ; the road was full of sharp stones ; the pony lost a shoe and began to limp ; They held
 out a carrot, but the poor pony would not walk ; a new horseshoe ; Eight quick nails fixed the shoe, and the pony
 trotted as well as before
Ferris Lane ; he ; ferryman ; the snow had melted in the hills ; the ford was too deep to cross ; They tried to wade,
 but the water was cold and fast ; a flat raft ; They pulled the raft across by its rope, and not one basket got wet
Otto Finch ; he ; wheelwright ; the summer had been hot and dry ; a wheel shrank and its rim fell off ; They tied the
 rim on with string, but the string snapped ; a tub of water ; They soaked the wheel until the wood swelled and held
 the rim tight
Lena Herd ; she ; shepherd ; the hills were bare and the grass was better below ; two hundred sheep blocked the bridge
 ; They shouted and waved, but the sheep only stared ; a bone whistle ; One whistle brought the sheepdog, and the
 flock parted like a curtain
Dame Harriet ; she ; saddler ; the load was heavy and the harness was old ; the main strap broke on the hill ; They
 knotted the ends together, but the knot slipped ; a strong new strap ; They buckled the strap on, and the pony pulled
 with all its might
""",
    "chain": """
want ; owner ; swap ; maker ; chore ; done
flour ; miller ; a new broom ; broom maker ; gather birch twigs ; Soon there was a tall heap of twigs
eggs ; henwife ; a sack of barley ; farmer ; chase the crows out of the field ; Not one crow dared to stay
butter ; dairymaid ; a sharp knife ; knife grinder ; turn the heavy grindstone ; Round and round went the stone
honey ; beekeeper ; a pot of white paint ; painter ; wash the sticky brushes ; Every bristle came out clean
plums ; orchard keeper ; a tall ladder ; carpenter ; sweep up the shavings ; The floor had never been so tidy
cinnamon ; pedlar ; a hot supper ; innkeeper ; peel a bucket of potatoes ; The peels made a curly mountain
cream ; goatherd ; a brass bell ; bell founder ; polish the candlesticks ; They shone like little suns
walnuts ; squire ; a warm scarf ; knitter ; wind the tangled wool ; At last the wool lay in round balls
raisins ; grocer ; a paper lantern ; lantern maker ; fold the coloured paper ; The folds were as straight as rulers
salt ; fishwife ; a clay crock ; potter ; stamp the wet clay with bare feet ; The clay grew soft as dough
cherries ; vicar ; a mended bell rope ; rope maker ; hold the end of the rope ; The three strands twisted into one
""",
    "treasure": """
name ; mark ; joy
kite ; a tail of paper bows ; fly it from the top of Windmill Hill
wooden horse ; a mane of real hair ; gallop it along the garden wall
spinning top ; a ring of painted stars ; spin it on the kitchen table
drum ; a strap of braided wool ; march behind it up and down the lane
cap ; a goose feather in the band ; wear it to the market
tin whistle ; a dent near the end ; play it to the cows
toy boat ; a sail made from a handkerchief ; float it on the mill pond
rag doll ; two buttons for eyes ; tell it secrets at bedtime
ball ; a white stripe around it ; bounce it against the barn
skipping rope ; handles carved like acorns ; skip with it in the yard
lantern ; a tiny door of glass ; carry it along the dark path
hoop ; a bell tied to the rim ; roll it down the hill
pencil box ; a lid that slid open ; draw birds with the pencils inside
marble ; a swirl like a small storm ; hold it up to the sun
puppet ; strings as thin as cobwebs ; make it dance for the neighbours
""",
    "loss": """
thief ; clue ; where ; fetch
a magpie had carried it off ; a black and white feather ; in a nest at the top of the elm ; climbed from branch to
 branch and brought it down
the puppy had buried it ; a row of muddy paw prints ; in a fresh hole under the rose bush ; dug with both hands until
 it came free
the wind had blown it away ; a line of flattened grass ; in the ditch beside the barley field ; slid down the bank and
 picked it up
the young goat had dragged it off ; a chewed piece of string ; behind the goat shed ; traded it for a handful of clover
the stream had carried it away ; a wet patch on the stepping stones ; among the reeds below the footbridge ; hooked it
 with a forked stick
it had dropped through a hole in the sack ; a thin trail of barley ; in the dusty corner of the granary ; moved nine
 sacks and pulled it out
it had gone out with the laundry ; a wooden clothes peg on the floor ; at the bottom of the washing basket ; shook out
 every sheet until it tumbled free
the hens had made a bed of it ; a speckled feather on the step ; under the fattest hen in the coop ; waited until the
 hen stood up and then reached in
a squirrel had hidden it ; a heap of empty nutshells ; in the hollow of the old chestnut tree ; reached in up to the
 shoulder and drew it out
""",
    "stray": """
name ; sound ; food ; tracks ; where ; stuck
lamb ; bleated ; warm milk ; tufts of white wool on the thorns ; in the bramble thicket ; its fleece was caught
donkey ; brayed ; a crisp carrot ; round hoof marks ; at the bottom of the gravel pit ; the sides were too steep
calf ; mooed ; a lick of salt ; deep prints in the clay ; beyond the broken fence ; it could not find the gap again
duckling ; peeped ; bread crumbs ; marks like tiny stars ; under the mill wheel ; the current was too strong
kid goat ; whimpered ; fresh ivy ; nibbled leaves along the hedge ; on a ledge of the quarry ; it was afraid to jump
piglet ; squealed ; a boiled turnip ; a dug-up row of acorns ; in the hollow log ; its belly was too round
pony ; whinnied ; a sweet apple ; a lost horseshoe ; on the far side of the marsh ; the ground was too soft
puppy ; howled ; a meaty bone ; a trail of chewed sticks ; down in the badger hole ; its collar had snagged on a root
gosling ; honked ; a handful of oats ; soft grey down on the nettles ; in the empty well bucket ; the rim was too high
kitten ; mewed ; a saucer of cream ; scratches on the bark ; at the top of the tallest pine ; it dared not climb down
""",
    "noise": """
sound ; guess ; where ; truth ; remedy
a slow scratching ; a wolf at the door ; behind the woodpile ; a hedgehog looking for beetles ; left it a dish of scraps
a long low moan ; a ghost in the chimney ; up in the attic ; the wind blowing over an empty bottle ; put a cork in the
 bottle
a steady tapping ; a robber at the window ; outside the pantry ; a loose shutter swinging on one nail ; tied the
 shutter with twine
a soft flapping ; a giant bat ; up in the hayloft ; a barn owl feeding three chicks ; tiptoed back down the ladder
a deep rumble ; a bear under the floor ; down in the cellar ; a barrel of cider rolling to and fro ; wedged the barrel
 with a brick
a thin squeak ; a goblin on the stairs ; under the third step ; a mouse with a crust too big for its hole ; broke the
 crust in two for it
a sudden clatter ; a witch in the kitchen ; beside the stove ; the cat with its head in a milk jug ; eased the jug off
 very gently
a dull drip ; a snake in the bucket ; over the washstand ; rain coming through one missing tile ; set a bowl under the
 drip
""",
    "season": """
name ; air ; sign
spring ; mild ; the apple trees were white with blossom
spring ; breezy ; lambs skipped on the hillside
summer ; golden ; bees hummed over the clover
summer ; cloudless ; the hay smelled sweet
autumn ; crisp ; brown leaves raced along the lane
autumn ; misty ; the hedges were heavy with berries
""",
    "trait": """
word ; habit
curious ; asked questions from breakfast to bedtime
cheerful ; whistled even while washing dishes
patient ; could watch a snail for an hour
stubborn ; never gave up before the third try
gentle ; carried spiders outside in a cup
careful ; tied every knot twice
clever ; could add faster than the grocer
dreamy ; saw castles in every cloud
brave ; climbed tall trees without looking down
helpful ; opened gates for everyone
bashful ; spoke so softly that people leaned in
tidy ; kept both boots in a straight line
merry ; laughed at the smallest joke
thoughtful ; remembered every birthday in the village
lively ; ran where others walked
sensible ; carried string in every pocket
""",
    "place": """
name ; at ; sight
mill pond ; at the mill pond ; Dragonflies darted over the lilies
stone bridge ; on the stone bridge ; Trout hung still in the shade below
churchyard ; in the churchyard ; Sparrows quarrelled along the wall
old orchard ; in the old orchard ; Wasps feasted on the fallen pears
village green ; on the village green ; Two geese marched about like soldiers
blacksmith's yard ; in the blacksmith's yard ; Sparks jumped from the anvil
hayfield ; in the hayfield ; Poppies nodded among the stubble
beech wood ; in the beech wood ; A woodpecker drummed far away
sheep pasture ; in the sheep pasture ; The ewes chewed and stared
riverbank ; on the riverbank ; A kingfisher flashed past
well ; beside the well ; Moss grew thick between the stones
vicarage garden ; in the vicarage garden ; The roses had just opened
market square ; in the market square ; Pigeons pecked between the stalls
tavern yard ; in the tavern yard ; A sleepy horse flicked its tail
windmill ; under the windmill ; The great sails creaked around
chalk pit ; by the chalk pit ; Rabbits vanished into the gorse
""",
    "crop": """
many ; one ; hue ; dish
peas ; pea ; green ; pie
onions ; onion ; brown ; soup
turnips ; turnip ; purple ; stew
cucumbers ; cucumber ; cool ; chutney
cabbages ; cabbage ; pale ; broth
carrots ; carrot ; orange ; salad
beets ; beet ; dark ; pickle
potatoes ; potato ; lumpy ; mash
leeks ; leek ; slender ; tart
pumpkins ; pumpkin ; round ; pudding
radishes ; radish ; pink ; relish
parsnips ; parsnip ; long ; fritter
beans ; bean ; speckled ; casserole
marrows ; marrow ; yellow ; jelly
""",
    "pest": """
many ; damage ; guard ; result
slugs ; ate holes in the leaves ; a ring of crushed eggshells ; the slugs turned back at the sharp edges
rabbits ; nibbled the tender shoots ; a fence of woven hazel ; the rabbits could not squeeze through
crows ; pecked at the seedlings ; a scarecrow in an old waistcoat ; the crows flapped away in fright
caterpillars ; stripped the stalks bare ; a nesting box for the wrens ; the wrens ate every caterpillar
moles ; heaved up the rows ; a windmill on a pole ; the moles disliked the shaking and moved away
deer ; trampled the beds at night ; a rope hung with tin lids ; the clanging sent the deer leaping off
""",
    "game": """
name ; where ; way ; slip ; prize
sack race ; on the village green ; hop ; tripped on the hem of the sack ; a basket of gingerbread
egg race ; in the market square ; walk with an egg on a spoon ; dropped the egg and slipped on the yolk ; a blue ribbon
barrow race ; in the cobbled lane ; push a loaded barrow ; hit a stone and tipped over ; a plum cake
stilt race ; in the hayfield ; stride on wooden stilts ; caught a stilt in a molehill ; a silver button
raft race ; on the riverbank ; paddle a raft ; ran onto a sandbank ; a smoked ham
goose chase ; in the farmyard ; herd a goose to the gate ; fell over the goose ; a feather cushion
hill race ; at the foot of the hill ; run up to the beacon and back ; twisted an ankle on a root ; a brass medal
pancake race ; in front of the inn ; run while tossing a pancake ; stepped on the pancake ; a copper pan
""",
    "gift": """
name ; stuff ; step ; hide
knitted shawl ; soft grey wool ; knitted one row after another ; under the mattress
carved spoon ; a piece of cherry wood ; whittled the bowl thin and smooth ; in the oat bin
painted tile ; white clay and blue glaze ; painted a tiny swallow on it ; behind the dresser
lavender pillow ; linen and dried flowers ; stuffed it and sewed it shut ; inside a boot
beaded purse ; glass beads and red thread ; threaded bead after bead ; in the flour crock
pressed flower picture ; pansies and thin card ; glued each petal with care ; between two big books
beeswax candle ; warm wax and a wick ; dipped the wick again and again ; up in the rafters
birdhouse ; cedar boards and small nails ; nailed the little roof on ; in the coal shed
willow flute ; a straight willow branch ; cut six holes for the fingers ; in the rain gutter
felt hat ; thick felt and strong thread ; stitched the brim twice ; under the stairs
""",
    "custom": """
yours ; ours ; act
quoits ; ringtoss ; throwing hoops over a peg
hide and seek ; fox and hens ; counting to twenty with closed eyes
skipping ; jump rope ; singing rhymes while the rope turned
knucklebones ; jacks ; tossing five little stones
hopscotch ; snail steps ; hopping along squares drawn with chalk
conkers ; nutcrackers ; swinging chestnuts on strings
leapfrog ; toad jump ; vaulting over bent backs
ninepins ; skittles ; rolling a ball at wooden pegs
""",
    "opposite": """
one ; other
was tall ; was short
had a loud voice ; had a quiet voice
was quick ; was slow
had curly hair ; had straight hair
was strong ; was weak
was neat ; was messy
had long legs ; had short legs
liked to talk ; liked to listen
was older ; was younger
got up early ; got up late
was bold ; was timid
""",
    "contrary": """
word ; back
hot ; cold
big ; small
wet ; dry
full ; empty
open ; shut
heavy ; light
old ; young
rich ; poor
sweet ; sour
clean ; dirty
hard ; soft
day ; night
hungry ; full
near ; far
""",
    "edge": """
one ; other
was tall ; was short
was quick ; was slow
was strong ; was weak
had long legs ; had short legs
was older ; was younger
was bold ; was timid
was calm ; was nervous
""",
    "village": """Thistledown, Little Marrow, Upper Wick, Bramblecombe, Oxley, Nettlebridge, Fallow End, Hollybrook,
        Pennywell, Larkhill, Dunmere, Cowslip Cross, Saltersford, Mossley, Withy Green""",
    "home": """beside the mill, at the end of Candle Lane, above the bakery, behind the chapel, near the toll gate,
        in a cottage with a crooked door, next to the duck pond, on the edge of the wood, across from the inn,
        at the foot of the hill, in the narrowest house on the green, in the lane of the weavers""",
    "colour": "red, blue, green, yellow, purple, brown, white, orange, scarlet, grey, pink, turquoise, ivory, golden",
    "junk": """a bent spoon, three dry beans, a lost button, a candle stub, a ball of fluff, an old turnip, a rusty key,
        a snail shell, half a biscuit, a broken comb, a thimble, last year's almanac, an odd sock, a cork,
        a dead moth, a piece of chalk, a bit of string, an acorn""",
    "wrong": """string, porridge paste, wet clay, candle wax, a hair ribbon, sticky jam, pine sap, a bootlace, old rags,
        twisted grass""",
    "pay": """a jar of honey, six brown eggs, a loaf of rye bread, a round cheese, a bunch of radishes, a pot of jam,
        a bag of hazelnuts, a bottle of elderberry juice, a string of onions, a slice of ham, two fat trout""",
    "occasion": """the harvest supper, the wedding at the inn, the spring fair, the vicar's birthday, the lantern night,
        the school picnic, the midsummer dance, the shearing feast""",
    "bake": "cake, pie, tart, pudding, honey loaf, crumble, plaited bun, gingerbread house, strudel, batch of scones",
    "wish": """a kite with a dragon on it, a pair of skates, a tin soldier, a bag of toffee, a silk ribbon, a mouth
        organ, a pocket knife, a box of paints, a straw hat, a glass bird""",
    "berry": "blackberries, strawberries, raspberries, cherries, gooseberries, blueberries, plums, currants, figs",
    "fine": "cheerful, sunny, playful, hopeful, splendid, jolly",
    "noon": """By noon, When the church bell rang twelve, After a bite of bread and cheese, When the shadows were
        short, Toward midday, An hour later""",
    "dusk": """In the evening, When the lamps were lit, At sunset, As the swallows flew home, When the stars came
        out, Before supper""",
}
