# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Sentences for MiniLM: some to calibrate with, others to measure with."""

from __future__ import annotations

#: To calibrate with.
CALIBRATION = """\
The weather in the mountains changed quickly during the afternoon.
She opened the old book and began to read the first chapter aloud.
Our team shipped the new release after a long week of testing.
Please send me the invoice before the end of the month.
Scientists discovered a new species of frog in the rainforest.
You can change the language in the settings menu.
Heavy rain flooded several streets in the old town.
The patient should take two tablets after each meal.
Stock prices fell sharply after the announcement.
This function returns the index of the first match.
How long does shipping to Norway usually take?
The goalkeeper saved a penalty in the last minute.
A child is drawing a house with blue crayons.
The museum is closed on Mondays and public holidays.
Add the onions to the pan and stir until they are golden.
The court ruled that the contract was not binding.
Where can I find the serial number of my printer?
Engineers inspected the bridge for cracks after the earthquake.
The orchestra rehearsed the symphony twice before the concert.
Farmers in the valley grow apples, pears and plums.
The spacecraft sent back pictures of the icy moon.
My grandmother taught me how to bake bread.
The compiler reports an error when a variable is not declared.
Two dogs are chasing a ball across the beach.
Unemployment has dropped to its lowest level in ten years.
The novel tells the story of three sisters in a small village.
Turn left at the traffic lights and follow the river.
The vaccine was tested on several thousand volunteers.
A waiter is carrying four plates at once.
Is it safe to drink the tap water there?
The battery lasts about nine hours on a single charge.
Parliament will vote on the new budget next Tuesday.
The mountain climbers reached the summit at sunrise.
Wolves hunt in packs and communicate by howling.
The database is backed up every night at two o'clock.
He plays the trumpet in a jazz band.
The carpenter measured the shelf twice and cut it once.
Plants turn sunlight into sugar by photosynthesis.
The tickets were sold out within an hour.
An old man is feeding pigeons in the park.
""".splitlines()
#: To measure with; none of them is among the others.
HELD_BACK = """\
A man is eating food.
A man is eating a piece of bread.
The girl is carrying a baby.
A man is riding a horse.
A woman is playing violin.
Two men pushed carts through the woods.
A monkey is playing drums.
A cheetah is running behind its prey.
Quarterly revenue grew by seven percent.
The central bank raised interest rates again.
How do I reset my password?
Quantization stores each weight in four bits.
The train to Lisbon leaves from platform nine.
Children learn languages faster than adults.
The recipe calls for three eggs and a cup of flour.
A storm knocked out power across the island.
The defendant pleaded not guilty to all charges.
What is the boiling point of water at high altitude?
Her painting won first prize at the exhibition.
The server returned an empty response.
Researchers measured the temperature of the deep ocean.
He repaired the bicycle with a piece of wire.
The hotel offers free breakfast and parking.
Migrating birds navigate by the stars.
The company plans to open twenty new stores.
A woman is slicing tomatoes in the kitchen.
The senator answered questions from reporters.
Install the package before you run the script.
The lighthouse can be seen from far away.
Antibiotics do not help against viruses.
The kitten fell asleep on the warm laptop.
Oil prices rose after the meeting of exporters.
The choir sang in the cathedral on Christmas Eve.
Can I return a product without the receipt?
The astronaut floated outside the space station.
Volcanic soil is rich in minerals.
The students handed in their essays on Friday.
A boy is jumping into a swimming pool.
The algorithm sorts the list in linear time.
The bakery on the corner sells excellent croissants.
""".splitlines()
