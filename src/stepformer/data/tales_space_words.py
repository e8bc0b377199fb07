"""The words of the dialect "space", in the notation explained in `tales`.

As in the village, some rows are facts that hold in every story: which officer repairs what with which tool, what hangs
outside the window of which station, what each rock looks like.
"""

from __future__ import annotations

ROLES = {"hero": "cadet", "friend": "cadet", "rival": "cadet", "expert": "officer"}

TABLES = {
    "cadet": """
name ; he
Zara, Nova, Lyra, Vega, Mira, Juno, Selene, Kaia, Tova, Ione, Rhea, Thora, Xenia, Yuna, Anika, Cressida, Dione ; she
Elara, Freya, Halley, Inara, Kestrel, Leda, Noor, Oriel, Petra, Quilla, Sunniva, Talia, Ursa, Wanda ; she
Orin, Kepler, Dario, Leto, Ravi, Tycho, Zeno, Enzo, Bodhi, Cato, Kiran, Luka, Matteo, Niko, Omar, Pavel, Soren ; he
Teo, Ugo, Viktor, Yuri, Arlen, Bruno, Corvin, Emeka, Farid, Galen, Hiro, Jonan, Marek, Rigel ; he
""",
    "captain": """
name ; he
Captain Ibarra, Captain Moreau, Commander Silva, Commander Oyelaran, Captain Brandt ; she
Captain Tanaka, Captain Hale, Commander Petrov, Commander Diallo, Captain Lund ; he
""",
    "officer": """
name ; he ; post ; room ; tool ; item ; cause ; fault ; cure
Amara Adeyemi ; she ; engineer ; engine room ; wrench ; coolant pump ; ice had formed in a pipe ; rattled and shook ;
 loosened the frozen joint and tightened it again
Nils Lindqvist ; he ; electrician ; fuse room ; voltmeter ; corridor light ; a wire had worn thin ; flickered like a
 candle ; measured each wire and replaced the weak one
Bao Tran ; she ; welder ; workshop ; plasma torch ; cargo hatch ; a container had bumped it ; did not close tightly ;
 melted a shining seam along the edge
Dev Kapoor ; he ; programmer ; computer core ; data cable ; food printer ; two numbers had been swapped ; printed only
 green cubes ; connected the cable and set the numbers right
Ines Calder ; she ; astronomer ; observatory ; lens cloth ; telescope ; somebody had touched the mirror ; showed
 nothing but a blur ; wiped the mirror in slow circles
Otis Wong ; he ; radio operator ; signal room ; tuner ; antenna ; a micrometeorite had knocked it ; pointed the wrong
 way ; turned it degree by degree until the hum was clear
Freja Holm ; she ; suit technician ; airlock ; sealant gun ; space suit ; a sharp edge had scraped it ; hissed at the
 knee ; pressed a stripe of sealant over the tiny hole
Marco Bellini ; he ; chemist ; laboratory ; fresh filter ; air scrubber ; it was choked with lint ; wheezed and
 smelled of socks ; pulled out the grey filter and pushed in the clean one
Hana Sato ; she ; roboticist ; robot bay ; magnetic driver ; maintenance drone ; its gyroscope had slipped ; flew in
 circles ; opened the hull and centred the gyroscope
Gus Arroyo ; he ; plumber ; water plant ; pipe clamp ; water recycler ; a gasket had dried out ; dripped floating
 beads of water ; closed the clamp around the new gasket
Ruta Kask ; she ; machinist ; machine shop ; lathe ; treadmill ; a tooth had broken off its gear ; jerked at every
 step ; turned a new gear from a bar of titanium
Sami Haddad ; he ; quartermaster ; storeroom ; grease can ; cargo lift ; dust had dried its rails ; stopped between
 two decks ; greased both rails from top to bottom
Olga Byrne ; she ; navigator ; chart room ; star chart ; autopilot ; it had mixed up two bright stars ; steered in a
 zigzag ; compared the chart with the sky and marked the true star
Lars Ekman ; he ; medic ; sick bay ; cooling gel ; sleep pod ; its heater had been set too high ; was as hot as an
 oven ; spread the gel over the heater and turned it down
Priya Nair ; she ; botanist ; greenhouse ; pruning hook ; watering arm ; a vine had wound around it ; could not swing
 any more ; cut the vine and freed the joint
Felix Oduya ; he ; geologist ; rock lab ; diamond bit ; core drill ; it had struck solid basalt ; screeched and stood
 still ; screwed it in, and it cut through the stone like butter
""",
    "rover": """
helper ; he ; post ; cause ; effect ; fail ; need ; cure
Sergeant Ames ; she ; driver ; the dust on the plain was as fine as flour ; the rover sank to its axles ; They spun
 the wheels, but the wheels only threw up dust ; a winch ; The winch hooked onto a boulder, and the cable drew the
 rover out
Sergeant Bello ; he ; scout ; a quake had opened the ground ; a deep crack cut off the track ; They drove along the
 crack, but it had no end ; a folding bridge ; The bridge clicked together piece by piece, and the rover rolled across
Sergeant Cho ; she ; electrician ; a dust storm had covered the solar panels ; the battery went flat ; They pressed
 the starter again, but the rover only clicked ; a soft broom ; They swept the panels clean, and in the sunlight the
 battery filled up
Sergeant Drake ; he ; mechanic ; the night had been colder than steel can bear ; a wheel bolt snapped ; They tied the
 wheel with wire, but it wobbled off ; a spare bolt ; The spare bolt slid in with a click, and the wheel turned true
Sergeant Eide ; she ; surveyor ; the sun stood low and the shadows were long ; they lost the track ; They turned left
 and came back to their own wheel prints ; a flare ; The flare rose over the ridge, and they steered toward its light
Sergeant Faro ; he ; miner ; loose rock had slid down in the night ; a boulder blocked the pass ; They pushed with the
 bumper, but the boulder did not budge ; a sonic drill ; The drill hummed until the boulder split into small stones
""",
    "robot": """
name ; he ; job ; flaw ; hint ; where ; fix
Bolt ; it ; sweeping robot ; its battery ran down ; a clean stripe on the dusty floor ; under the stairs of deck two ;
 plugged it into the charger
Pixel ; it ; painting robot ; its camera was splashed with paint ; a dotted line of paint drops ; facing a blank wall
 ; wiped its camera clean
Tock ; it ; clock robot ; it had missed the change to summer time ; a faint ticking ; in the empty mess hall ; set its
 clock one hour forward
Widget ; it ; delivery robot ; it had been given two addresses ; a parcel left in the middle of the hall ; between two
 doors ; crossed out the wrong address
Fizz ; it ; kitchen robot ; a crumb had jammed its wheel ; a trail of biscuit crumbs ; in the corner of the galley ;
 picked the crumb out with tweezers
Socket ; it ; repair robot ; a magnet had caught it ; a row of missing screws ; stuck to the generator ; switched the
 magnet off
Echo ; it ; singing robot ; its volume knob had been turned to zero ; a very soft hum ; in the laundry chute ; turned
 the knob back up
Dewdrop ; it ; watering robot ; its tank was empty ; a wet track that grew thinner ; behind the tomato rack ; filled
 its tank to the brim
Ratchet ; it ; lifting robot ; its arm was locked ; long scratches on the wall ; wedged in the freight tunnel ;
 pressed the red release button
Lumen ; it ; lamp robot ; its bulb had burned out ; a burnt smell ; alone in the darkest corridor ; screwed in a new
 bulb
""",
    "leak": """
sound ; where ; cause ; patch
thin hiss ; behind the map locker ; a grain of meteor dust had gone through the hull ; a square of hull tape
low whistle ; beside the porthole ; the rubber seal had cracked in the cold ; a ring of fresh rubber
faint sigh ; under the bunk ; a rivet had shaken loose ; a new rivet and a drop of glue
sharp squeal ; at the end of the pipe shaft ; a valve had been left half open ; a firm turn of the valve
steady whisper ; above the air vent ; the metal had worn as thin as paper ; a steel plate
soft flutter ; by the escape hatch ; a scrap of cloth was caught in the seal ; a clean wipe and a tight close
""",
    "plant": """
many ; one ; hue ; light ; sick ; reason ; help
tomatoes ; tomato ; red ; warm light ; curled up ; the lamp hung too close ; raised the lamp by an arm's length
strawberries ; strawberry ; crimson ; pink light ; turned pale ; the feed tank was empty ; mixed fresh plant food
peppers ; pepper ; yellow ; bright light ; lost their blossoms ; there were no bees in space ; carried pollen from
 flower to flower with a brush
cucumbers ; cucumber ; green ; soft light ; grew crooked ; they had nothing to climb ; stretched strings up to the
 ceiling
radishes ; radish ; magenta ; cool light ; stayed tiny ; they were packed too tightly ; pulled out every second one
melons ; melon ; striped ; golden light ; went limp ; a hose had a kink ; straightened the hose
soybeans ; soybean ; cream-coloured ; white light ; grew mould ; the air did not move ; set up a small fan
sunflowers ; sunflower ; amber ; strong light ; turned their backs ; the lamp stood on the wrong side ; moved the lamp
 to the middle
""",
    "signal": """
pattern ; guess ; source ; reply
three short beeps and a long one ; a pirate ship ; a weather buoy with a cracked shell ; sent a drone to mend its shell
a slow pulse every nine seconds ; a giant heartbeat ; a pulsar turning far away ; gave it a name on the map
a scratchy melody ; a choir of aliens ; an old probe still playing its greeting ; played the melody back
a string of clicks ; a code of spies ; hailstones of ice tapping on a relay ; moved the relay out of the ice cloud
a rising wail ; a monster of the deep dark ; a lifeboat beacon from a mining tug ; guided the tug to the dock
a murmur like rain ; a ghost ship ; the northern lights of the planet ; recorded it as a lullaby
two voices talking backward ; a mirror world ; their own radio bouncing off a moon ; said hello and waited for the echo
""",
    "creature": """
name ; look ; cry ; food ; home
moon mouse ; silver fur and round ears ; chirped ; oat flakes ; a crater full of soft dust
spark beetle ; a shell that glowed at the tips ; buzzed ; flat batteries ; the wreck of an old lander
cloud jelly ; a body as clear as glass ; burbled ; peppermint tea ; the mist above the gas sea
pebble crab ; legs like polished gravel ; clicked ; crumbs of salt ; the shore of a frozen lake
star moth ; seven dots on its wings ; whirred ; sugar water ; the sunny side of an asteroid
frost hopper ; six toes and a white crest ; squeaked ; ice cubes ; a cave of blue ice
velvet worm ; a coat as soft as moss ; hummed ; cold noodles ; the warm mud by the geyser
ribbon eel ; a long tail that shimmered ; trilled ; seaweed crackers ; the dark ocean under the ice
""",
    "gem": """
name ; hue ; trait
quartz ; glassy ; rang like a bell
olivine ; olive green ; sparkled in the lamplight
meteoric iron ; steel grey ; pulled at the compass
sulphur ; yellow ; smelled of old eggs
lapis ; deep blue ; was dotted with gold
obsidian ; pitch black ; was sharper than a razor
garnet ; wine red ; broke into little dice
moonstone ; milky white ; glimmered from inside
pumice ; ash grey ; was so light that it floated
copper ; orange brown ; warmed up quickly in the hand
""",
    "spin": """
name ; he ; post ; room ; tool ; cause ; cure
Amara Adeyemi ; she ; engineer ; engine room ; wrench ; a bolt had dropped into the main gear ; twisted the bolt out
Nils Lindqvist ; he ; electrician ; fuse room ; voltmeter ; the main fuse had blown ; found the fuse and changed it
Dev Kapoor ; he ; programmer ; computer core ; data cable ; the computer had counted one second twice ; reset the count
Sami Haddad ; he ; quartermaster ; storeroom ; grease can ; the great bearing had run dry ; greased it well
Bao Tran ; she ; welder ; workshop ; plasma torch ; a spoke had cracked ; welded the crack until it glowed
""",
    "world": """
name ; look ; sky
Saturn ; with its wide bright rings ; orbiting Saturn
Jupiter ; with its great red storm ; orbiting Jupiter
Mars ; as rusty as an old nail ; circling Mars
Neptune ; as blue as ink ; near Neptune
Venus ; wrapped in yellow cloud ; above Venus
Mercury ; small and scorched ; close to Mercury
Earth ; all blue and white ; above the Earth
Uranus ; pale green and tipped on its side ; around Uranus
Pluto ; with a heart of ice ; far out by Pluto
""",
    "sport": """
name ; way ; slip ; prize
orb ball ; throw a glowing ball through a floating ring ; jumped too hard and sailed past the net ; a crystal cup
tunnel dash ; fly the long tunnel without touching the wall ; scraped the wall and spun out of the tunnel ; a pair of
 golden gloves
magnet climb ; climb the hull in magnet boots ; lost the grip of one boot ; a mission badge
drone derby ; steer a drone through twelve hoops ; leaned out too far and lost the handrail ; a model shuttle
bubble relay ; carry a bubble of water on a paddle ; slipped off the track ; a month of free dessert
crate stacking ; stack floating crates before the bell ; pushed a crate and flew off backward ; a silver whistle
comet tag ; tag a swinging lamp without letting go of the rail ; swung too wide and missed the rail ; a star globe
""",
    "crate": """
owner ; need ; label
medic ; bandages ; a white cross
cook ; noodles ; a steaming bowl
botanist ; seeds ; a green leaf
welder ; welding rods ; a flame
astronomer ; photo plates ; a star
programmer ; memory chips ; a small grid
radio operator ; spare coils ; a lightning bolt
geologist ; sample bags ; a hammer
plumber ; gaskets ; a blue drop
pilot ; fuel cells ; a pair of wings
""",
    "station": """Halcyon, Aurora, Meridian, Perihelion, Solstice, Wayfarer, Lodestar, Tranquil, Equinox, Corona,
        Zenith, Mistral""",
    "trait": """
word ; habit
inquisitive ; read manuals for fun
steady ; never let go of the handrail
inventive ; built gadgets out of spare parts
daring ; floated through the hub at full speed
methodical ; checked every list from top to bottom
observant ; noticed the smallest blinking light
talkative ; chatted even with the vending machine
serious ; practised drills before breakfast
playful ; turned somersaults in the lift
generous ; gave away every second dessert
persistent ; tried every key before calling for help
punctual ; was at the hatch one minute early
imaginative ; drew maps of planets that nobody had seen
modest ; blushed at the slightest praise
""",
    "opposite": """
one ; other
was left-handed ; was right-handed
loved the dark ; loved the light
spoke quickly ; spoke slowly
liked numbers ; liked pictures
came from a hot world ; came from a cold world
sat in front ; sat at the back
liked the top bunk ; liked the bottom bunk
was always hungry ; was always full
woke at first bell ; woke at last bell
""",
    "contrary": """
word ; back
up ; down
fast ; slow
bright ; dim
inside ; outside
push ; pull
launch ; landing
frozen ; molten
alone ; together
ahead ; behind
thick ; thin
smooth ; rough
silence ; noise
question ; answer
smallest ; largest
""",
    "deck": """
name ; on ; sight
observation dome ; in the observation dome ; Stars burned without a twinkle
cargo bay ; in the cargo bay ; Containers stood in strapped towers
mess hall ; in the mess hall ; The food printer purred
engine deck ; on the engine deck ; The reactor throbbed behind thick glass
hangar ; in the hangar ; Two shuttles slept under their covers
hub ; in the hub ; Everything drifted, even the tea
gym ; in the gym ; The treadmills whirred in a row
archive ; in the archive ; Old discs glinted on the shelves
algae room ; in the algae room ; Green tanks bubbled quietly
docking ring ; on the docking ring ; Clamps opened and closed like jaws
bunk deck ; on the bunk deck ; Somebody snored behind a curtain
mirror gallery ; in the mirror gallery ; The solar mirrors tilted toward the sun
""",
    "hue": "cobalt, silver, crimson, teal, bronze, lilac, emerald, maroon, indigo, beige, amber, violet, gold, magenta",
    "gadget": """
name ; mark ; use
wrist computer ; a scratched screen ; record the temperature of everything
pocket telescope ; a lens cap shaped like a moon ; count the craters
star map ; a coffee stain in one corner ; learn the constellations
helmet ; a comet painted on the side ; pretend to be a pilot
recorder ; a dial that clicked ; collect the sounds of the station
tether ; a knot at every metre ; swing across the hub
toolbelt ; nine narrow pouches ; mend whatever rattled
glove puppet ; antennas of wire ; act out alien plays
""",
    "snack": """a cube of chocolate, a packet of dried mango, a bulb of cocoa, a warm algae bun, a tube of peanut
        butter, a bowl of noodles, a bag of puffed rice, a slice of printed pizza, a frozen blueberry bar,
        a ginger wafer""",
    "clutter": """a lost stylus, a lonely sock, an empty juice bulb, two bent washers, a dried noodle, a cracked
        visor, a bundle of cable, a chess pawn, a loose bolt, an expired ticket, a magnet, a dead battery""",
    "patchwork": "chewing gum, a paper clip, foil, tape, a hair band, toothpaste, a rubber stopper, glue, a shoelace",
    "mood": "splendid, eager, bright, buoyant, adventurous, confident",
    "fest": """Landing Day, the Feast of First Orbit, the Long Night, the Lamp Parade, Founders' Day, the Eclipse Party,
        the Solar Games, Harvest Week""",
    "later": """At mid-shift, After second bell, Half an orbit later, Twenty minutes later, When the clock showed
        noon, Before the next bell""",
    "night": """At lights-out, When the night lamps glowed, At the end of the shift, After last bell, When the
        planet rolled into shadow""",
}
