"""Word and fact tables for the chat generators, written for this project."""

# ruff: noqa: E501 (sentence tables: one entry a line)

from __future__ import annotations


def _pairs(text: str) -> list[tuple[str, str]]:
    out = []
    for entry in text.replace("\n", " ").split(";"):
        if entry.strip():
            left, right = entry.split("=")
            out.append((left.strip(), right.strip()))
    return out


CAPITALS = _pairs("""
France=Paris; Germany=Berlin; Italy=Rome; Spain=Madrid; Portugal=Lisbon; the United Kingdom=London; England=London;
Scotland=Edinburgh; Wales=Cardiff; Ireland=Dublin; Norway=Oslo; Sweden=Stockholm; Finland=Helsinki; Denmark=Copenhagen;
Iceland=Reykjavik; the Netherlands=Amsterdam; Belgium=Brussels; Luxembourg=Luxembourg; Switzerland=Bern; Austria=Vienna;
Poland=Warsaw; the Czech Republic=Prague; Slovakia=Bratislava; Hungary=Budapest; Romania=Bucharest; Bulgaria=Sofia;
Greece=Athens; Croatia=Zagreb; Slovenia=Ljubljana; Serbia=Belgrade; Albania=Tirana; Estonia=Tallinn; Latvia=Riga;
Lithuania=Vilnius; Ukraine=Kyiv; Belarus=Minsk; Moldova=Chisinau; Russia=Moscow; Turkey=Ankara; Cyprus=Nicosia;
Malta=Valletta; Monaco=Monaco; Japan=Tokyo; China=Beijing; South Korea=Seoul; North Korea=Pyongyang; India=New Delhi;
Pakistan=Islamabad; Bangladesh=Dhaka; Nepal=Kathmandu; Bhutan=Thimphu; Sri Lanka=Colombo and Sri Jayawardenepura Kotte;
Thailand=Bangkok; Vietnam=Hanoi; Laos=Vientiane; Cambodia=Phnom Penh; Malaysia=Kuala Lumpur; Singapore=Singapore;
Indonesia=Jakarta; the Philippines=Manila; Mongolia=Ulaanbaatar; Kazakhstan=Astana; Uzbekistan=Tashkent; Iran=Tehran;
Iraq=Baghdad; Syria=Damascus; Jordan=Amman; Lebanon=Beirut; Saudi Arabia=Riyadh; Yemen=Sanaa; Oman=Muscat; Qatar=Doha;
Kuwait=Kuwait City; Afghanistan=Kabul; Georgia=Tbilisi; Armenia=Yerevan; Azerbaijan=Baku; Egypt=Cairo; Morocco=Rabat;
Algeria=Algiers; Tunisia=Tunis; Libya=Tripoli; Sudan=Khartoum; Ethiopia=Addis Ababa; Kenya=Nairobi; Uganda=Kampala;
Tanzania=Dodoma; Rwanda=Kigali; Nigeria=Abuja; Ghana=Accra; Senegal=Dakar; Mali=Bamako; Angola=Luanda; Zambia=Lusaka;
Zimbabwe=Harare; Mozambique=Maputo; Madagascar=Antananarivo; Namibia=Windhoek; Botswana=Gaborone; Somalia=Mogadishu;
Cameroon=Yaounde; Canada=Ottawa; the United States=Washington, D.C.; Mexico=Mexico City; Cuba=Havana; Jamaica=Kingston;
Haiti=Port-au-Prince; Guatemala=Guatemala City; Honduras=Tegucigalpa; Nicaragua=Managua; Costa Rica=San Jose;
Panama=Panama City; Colombia=Bogota; Venezuela=Caracas; Ecuador=Quito; Peru=Lima; Bolivia=Sucre; Chile=Santiago;
Argentina=Buenos Aires; Uruguay=Montevideo; Paraguay=Asuncion; Brazil=Brasilia; Australia=Canberra; New Zealand=Wellington;
Fiji=Suva; Papua New Guinea=Port Moresby
""")

# question=answer sentence; several wordings are separated by |
FACTS = _pairs("""
What is the largest planet?|Which planet is the largest?|Name the biggest planet.=Jupiter is the largest planet in the Solar System;
What is the smallest planet?|Which planet is the smallest?=Mercury is the smallest planet in the Solar System;
Which planet is closest to the Sun?|What is the nearest planet to the Sun?=Mercury is the planet closest to the Sun;
Which planet is known as the red planet?|What is the red planet?=Mars is known as the red planet;
Which planet has large rings?|Which planet is famous for its rings?=Saturn is famous for its rings;
How many planets are in the Solar System?|How many planets are there?=There are eight planets in the Solar System;
How many moons does the Earth have?|How many moons does Earth have?=The Earth has one moon;
What is the capital of the world?=The world has no capital;
What is the largest ocean?|Which ocean is the biggest?=The Pacific Ocean is the largest ocean;
What is the longest river in Africa?=The Nile is the longest river in Africa;
What is the longest river in South America?=The Amazon is the longest river in South America;
What is the highest mountain?|What is the tallest mountain on Earth?|Which mountain is the highest?=Mount Everest is the highest mountain on Earth;
What is the largest country?|Which country is the largest by area?=Russia is the largest country by area;
What is the smallest country?|Which country is the smallest?=Vatican City is the smallest country;
What is the largest desert?|Which hot desert is the largest?=The Sahara is the largest hot desert;
How many continents are there?|How many continents does the Earth have?=There are seven continents;
What is the largest animal?|Which animal is the largest?=The blue whale is the largest animal;
What is the fastest land animal?|Which animal runs fastest?=The cheetah is the fastest land animal;
What is the tallest animal?|Which animal is the tallest?=The giraffe is the tallest animal;
How many legs does a spider have?|How many legs do spiders have?=A spider has eight legs;
How many legs does an insect have?|How many legs do insects have?=An insect has six legs;
How many legs does a dog have?=A dog has four legs;
How many legs does a bird have?=A bird has two legs;
What do bees make?|What do bees produce?=Bees make honey;
What do cows eat?=Cows eat grass;
What do pandas eat?=Pandas eat mostly bamboo;
What sound does a dog make?=A dog barks;
What sound does a cat make?=A cat meows;
What sound does a cow make?=A cow moos;
What is a baby dog called?|What do you call a young dog?=A baby dog is called a puppy;
What is a baby cat called?|What do you call a young cat?=A baby cat is called a kitten;
What is a baby cow called?|What do you call a young cow?=A baby cow is called a calf;
What is a baby sheep called?|What do you call a young sheep?=A baby sheep is called a lamb;
What is a baby horse called?|What do you call a young horse?=A baby horse is called a foal;
What is a baby frog called?|What do you call a young frog?=A baby frog is called a tadpole;
What color is the sky?|Which color is the sky?=The sky is blue on a clear day;
What color is grass?|Which color does grass have?=Grass is green;
What color is snow?=Snow is white;
What color is a banana?|What color are bananas?=A ripe banana is yellow;
What color is blood?=Blood is red;
What color do you get from red and blue?|What do you get when you mix red and blue?=Red and blue make purple;
What color do you get from blue and yellow?|What do you get when you mix blue and yellow?=Blue and yellow make green;
What color do you get from red and yellow?|What do you get when you mix red and yellow?=Red and yellow make orange;
What are the primary colors?|Name the primary colors.=The primary colors of paint are red, yellow and blue;
What is water made of?|What is the formula of water?|What is the chemical formula of water?=Water is made of hydrogen and oxygen: H2O;
At what temperature does water boil?|When does water boil?|What is the boiling point of water?=Water boils at 100 degrees Celsius at sea level;
At what temperature does water freeze?|When does water freeze?|What is the freezing point of water?=Water freezes at 0 degrees Celsius;
What is the symbol of gold?|What is the chemical symbol for gold?=The chemical symbol for gold is Au;
What is the symbol of silver?|What is the chemical symbol for silver?=The chemical symbol for silver is Ag;
What is the symbol of iron?|What is the chemical symbol for iron?=The chemical symbol for iron is Fe;
What is the symbol of oxygen?|What is the chemical symbol for oxygen?=The chemical symbol for oxygen is O;
What is the symbol of carbon?|What is the chemical symbol for carbon?=The chemical symbol for carbon is C;
What is the lightest element?|Which element is the lightest?=Hydrogen is the lightest element;
What gas do plants take in?|Which gas do plants need?=Plants take in carbon dioxide;
What gas do we breathe?|Which gas do people need to breathe?=People need oxygen to breathe;
How fast is light?|What is the speed of light?=Light travels at about 300,000 kilometers per second;
How fast is sound?|What is the speed of sound?=Sound travels at about 340 meters per second in air;
How many bones does an adult have?|How many bones are in the human body?=An adult has 206 bones;
How many teeth does an adult have?=An adult has up to 32 teeth;
How many hearts does an octopus have?=An octopus has three hearts;
What pumps blood through the body?|Which organ pumps blood?=The heart pumps blood through the body;
Which organ do we think with?|What organ do we use to think?=We think with the brain;
How many days are in a week?|How many days does a week have?=A week has seven days;
How many days are in a year?|How many days does a year have?=A year has 365 days, or 366 in a leap year;
How many months are in a year?|How many months does a year have?=A year has twelve months;
How many weeks are in a year?=A year has about 52 weeks;
How many hours are in a day?|How many hours does a day have?=A day has 24 hours;
How many minutes are in an hour?|How many minutes does an hour have?=An hour has 60 minutes;
How many seconds are in a minute?|How many seconds does a minute have?=A minute has 60 seconds;
How many seconds are in an hour?=An hour has 3600 seconds;
What are the days of the week?|Name the days of the week.|List the days of the week.=The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday;
What are the seasons?|Name the four seasons.=The four seasons are spring, summer, autumn and winter;
What are the months of the year?|Name the months of the year.|List the months.=The months are January, February, March, April, May, June, July, August, September, October, November and December;
What is the first month of the year?=January is the first month of the year;
What is the last month of the year?=December is the last month of the year;
Which month is the shortest?|What is the shortest month?=February is the shortest month;
What day comes after Monday?=Tuesday comes after Monday;
What day comes after Tuesday?=Wednesday comes after Tuesday;
What day comes after Wednesday?=Thursday comes after Wednesday;
What day comes after Friday?=Saturday comes after Friday;
What day comes before Monday?=Sunday comes before Monday;
How many letters are in the English alphabet?|How many letters does the alphabet have?=The English alphabet has 26 letters;
What is the first letter of the alphabet?=The first letter of the alphabet is A;
What is the last letter of the alphabet?=The last letter of the alphabet is Z;
What are the vowels?|Name the vowels.=The vowels are A, E, I, O and U;
How many sides does a triangle have?=A triangle has three sides;
How many sides does a square have?=A square has four equal sides;
How many sides does a hexagon have?=A hexagon has six sides;
How many sides does a pentagon have?=A pentagon has five sides;
How many sides does an octagon have?=An octagon has eight sides;
How many faces does a cube have?=A cube has six faces;
What is pi?|What is the value of pi?=Pi is the ratio of a circle's circumference to its diameter, about 3.14159;
What is the square root of 16?=The square root of 16 is 4;
What is the square root of 25?=The square root of 25 is 5;
What is the square root of 81?=The square root of 81 is 9;
What is the square root of 100?=The square root of 100 is 10;
What is the smallest prime number?|Which prime is the smallest?=The smallest prime number is 2;
What are the first five primes?|Name the first five prime numbers.=The first five primes are 2, 3, 5, 7 and 11;
How many degrees are in a circle?=A circle has 360 degrees;
How many degrees are in a right angle?=A right angle has 90 degrees;
How many bits are in a byte?|How many bits does a byte have?=A byte has eight bits;
What is 2 to the power of 10?=2 to the power of 10 is 1024;
Who wrote Romeo and Juliet?|Who is the author of Romeo and Juliet?=William Shakespeare wrote Romeo and Juliet;
Who wrote Hamlet?|Who is the author of Hamlet?=William Shakespeare wrote Hamlet;
Who wrote Moby-Dick?|Who is the author of Moby-Dick?=Herman Melville wrote Moby-Dick;
Who wrote Paradise Lost?=John Milton wrote Paradise Lost;
Who wrote Pride and Prejudice?=Jane Austen wrote Pride and Prejudice;
Who wrote Don Quixote?=Miguel de Cervantes wrote Don Quixote;
Who painted the Mona Lisa?|Which artist painted the Mona Lisa?=Leonardo da Vinci painted the Mona Lisa;
Who painted The Starry Night?=Vincent van Gogh painted The Starry Night;
Who composed the Ninth Symphony with the Ode to Joy?=Ludwig van Beethoven composed it;
Who invented the telephone?=Alexander Graham Bell is credited with the telephone;
Who invented the World Wide Web?|Who created the World Wide Web?=Tim Berners-Lee invented the World Wide Web;
Who created Python?|Who invented Python?|Who made the Python language?=Guido van Rossum created Python;
Who created Linux?|Who started Linux?|Who wrote the Linux kernel?=Linus Torvalds created Linux;
Who created JavaScript?|Who invented JavaScript?=Brendan Eich created JavaScript;
Who created the C language?|Who invented C?=Dennis Ritchie created the C language;
Who created C++?|Who invented C++?=Bjarne Stroustrup created C++;
Who created Git?|Who wrote Git?=Linus Torvalds created Git;
Who discovered gravity?|Who described gravity?=Isaac Newton described the law of gravity;
Who developed the theory of relativity?|Who discovered relativity?=Albert Einstein developed the theory of relativity;
Who proposed evolution by natural selection?=Charles Darwin proposed evolution by natural selection;
Who discovered penicillin?=Alexander Fleming discovered penicillin;
Who was Alan Turing?=Alan Turing was a pioneer of computer science;
Who was Ada Lovelace?=Ada Lovelace wrote one of the first computer programs;
Who was Grace Hopper?=Grace Hopper was a pioneer of compilers;
Who was the first person on the Moon?|Who first walked on the Moon?=Neil Armstrong was the first person on the Moon;
Who was the first person in space?=Yuri Gagarin was the first person in space;
Who was the first president of the United States?|Who was the first US president?=George Washington was the first president of the United States;
When did people first land on the Moon?|In which year was the first Moon landing?=People first landed on the Moon in 1969;
When did the Second World War end?|When did World War II end?=The Second World War ended in 1945;
When did the First World War begin?|When did World War I start?=The First World War began in 1914;
When did the Berlin Wall fall?=The Berlin Wall fell in 1989;
In which city is the Eiffel Tower?|Where is the Eiffel Tower?=The Eiffel Tower is in Paris;
Where is the Colosseum?|In which city is the Colosseum?=The Colosseum is in Rome;
Where is Big Ben?|In which city is Big Ben?=Big Ben is in London;
Where is the Statue of Liberty?=The Statue of Liberty is in New York;
Where are the pyramids of Giza?=The pyramids of Giza are in Egypt;
Where is the Taj Mahal?=The Taj Mahal is in Agra, India;
Where is the Great Wall?=The Great Wall is in China;
Where do kangaroos live?=Kangaroos live in Australia;
Where do penguins live?=Most penguins live in the southern half of the Earth, many in Antarctica;
Where do polar bears live?=Polar bears live in the Arctic;
What language is spoken in Brazil?|Which language do people speak in Brazil?=People in Brazil speak Portuguese;
What language is spoken in Mexico?|Which language do people speak in Mexico?=People in Mexico speak Spanish;
What language is spoken in Austria?|Which language do people speak in Austria?=People in Austria speak German;
What language is spoken in Egypt?=People in Egypt speak Arabic;
What language is spoken in Japan?|Which language do people speak in Japan?=People in Japan speak Japanese;
What is the currency of Japan?|Which currency is used in Japan?=The currency of Japan is the yen;
What is the currency of the United Kingdom?=The currency of the United Kingdom is the pound;
What is the currency of Switzerland?=The currency of Switzerland is the Swiss franc;
What is the currency of India?=The currency of India is the rupee;
What is the currency of Germany?|Which currency is used in Germany?=The currency of Germany is the euro;
What is the currency of France?=The currency of France is the euro;
What is the opposite of hot?=The opposite of hot is cold;
What is the opposite of big?=The opposite of big is small;
What is the opposite of fast?=The opposite of fast is slow;
What is the opposite of happy?=The opposite of happy is sad;
What is the opposite of light?=The opposite of light is dark, or heavy;
What is the opposite of up?=The opposite of up is down;
What is the opposite of open?=The opposite of open is closed;
What is the opposite of early?=The opposite of early is late;
What is the opposite of old?=The opposite of old is young, or new;
What is the opposite of strong?=The opposite of strong is weak;
What is the plural of mouse?=The plural of mouse is mice;
What is the plural of child?=The plural of child is children;
What is the plural of foot?=The plural of foot is feet;
What is the plural of tooth?=The plural of tooth is teeth;
What is the plural of goose?=The plural of goose is geese;
What is the past tense of go?=The past tense of go is went;
What is the past tense of eat?=The past tense of eat is ate;
What is the past tense of run?=The past tense of run is ran;
What is the past tense of see?=The past tense of see is saw;
What is the past tense of write?=The past tense of write is wrote;
What does HTML stand for?|What is HTML short for?=HTML stands for HyperText Markup Language;
What does CSS stand for?|What is CSS short for?=CSS stands for Cascading Style Sheets;
What does CPU stand for?|What is CPU short for?=CPU stands for central processing unit;
What does GPU stand for?|What is GPU short for?=GPU stands for graphics processing unit;
What does RAM stand for?|What is RAM short for?=RAM stands for random-access memory;
What does SQL stand for?|What is SQL short for?=SQL stands for Structured Query Language;
What does API stand for?|What is API short for?=API stands for application programming interface;
What does URL stand for?|What is URL short for?=URL stands for Uniform Resource Locator;
What does JSON stand for?|What is JSON short for?=JSON stands for JavaScript Object Notation;
What does HTTP stand for?|What is HTTP short for?=HTTP stands for Hypertext Transfer Protocol;
What does USB stand for?|What is USB short for?=USB stands for Universal Serial Bus;
What does DNA stand for?=DNA stands for deoxyribonucleic acid;
What does NASA stand for?=NASA stands for National Aeronautics and Space Administration
""")

NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olivia Paul Quinn Rosa Sam Tina "
    "Uma Victor Wendy Xavier Yara Zoe Alice Bob Carol Dan Eva Frank Gina Hugo Iris Jonas Karl Lena Max Nina "
    "Oscar Petra Ravi Sara Tom Ursula Vera Will Yuki Zach Amir Bella Chen Diana Elias Fatima George Hana Ivan "
    "Julia Kofi Laura Marco Nadia Omar Priya Ruth Simon Tara Lucy Peter Mary John Sophie Daniel Maria Alex"
).split()
CITIES = (
    "Paris Berlin London Madrid Rome Oslo Vienna Prague Dublin Lisbon Athens Tokyo Delhi Cairo Lima Boston "
    "Chicago Toronto Sydney Munich Hamburg Geneva Milan Naples Kyoto Seoul Nairobi Havana Warsaw Helsinki"
).split()
ANIMALS = (
    "cat dog fox bear rabbit mouse owl duck frog horse pony kitten puppy lamb goat hen bird squirrel hedgehog "
    "turtle bee penguin whale dragon lion tiger elephant monkey deer snail"
).split()
ADJECTIVES = (
    "little small brave kind clever happy curious gentle quiet shy funny young old tiny quick sleepy hungry "
    "lonely cheerful friendly"
).split()
PLACES = (
    "forest|garden|village|meadow|river|lake|farm|mountain|beach|town|barn|castle|valley|park|island|hill"
).split("|")
THINGS = (
    "ball|red hat|golden key|blue kite|shiny stone|small boat|lantern|bell|book|map|apple|flower|drum|"
    "feather|wooden spoon|blanket|coin|letter|star|shell|basket|music box|pair of boots|seed"
).split("|")
FOODS = (
    "bread|cheese|soup|apples|rice|pasta|cake|honey|carrots|pancakes|berries|cookies|salad|tea|pizza|nuts"
).split("|")
HOBBIES = (
    "reading|swimming|chess|painting|hiking|cooking|music|gardening|running|cycling|football|dancing|"
    "photography|programming|fishing|singing"
).split("|")
JOBS = (
    "teacher|nurse|farmer|engineer|baker|doctor|student|pilot|writer|driver|gardener|programmer|painter|cook"
).split("|")
