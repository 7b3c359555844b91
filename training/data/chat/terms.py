"""Common terms of computing, science and daily life, each explained in one sentence of our own."""

# ruff: noqa: E501 (sentence tables: one entry a line)

from __future__ import annotations

import random
from collections.abc import Iterator

from .core import Item, pick, vary

# term=explanation; "a"/"an" before a term is used in questions of the form "What is a ...?"
TABLE = """
an algorithm=An algorithm is a finite list of clear steps that solves a problem.
recursion=Recursion means that a function solves a problem by calling itself on a smaller part.
a compiler=A compiler translates source code into machine code before the program runs.
an interpreter=An interpreter runs source code step by step without compiling it first.
a variable=A variable is a name for a value that a program can read and change.
a function=A function is a named piece of code that takes inputs and returns a result.
a loop=A loop repeats a piece of code until a condition is no longer true.
an array=An array stores many values in a row and gives each one an index.
a list=A list is an ordered collection of values that can grow and shrink.
a string=A string is a piece of text made of characters.
an integer=An integer is a whole number without a fraction.
a boolean=A boolean is a value that is either true or false.
a class=A class describes the data and the methods that its objects have.
an object=An object holds data together with the functions that work on it.
inheritance=Inheritance lets a class take over the data and methods of another class.
a pointer=A pointer is a value that holds the address of another value in memory.
a stack=A stack is a collection where the last element put in is the first one taken out.
a queue=A queue is a collection where the first element put in is the first one taken out.
a hash table=A hash table finds values quickly by computing their place from a key.
a hash function=A hash function turns data of any size into a number of fixed size.
a linked list=A linked list is a chain of nodes, each of which points to the next one.
a tree=A tree is a structure of nodes in which each node has one parent and any number of children.
a binary tree=A binary tree is a tree whose nodes have at most two children.
a graph=A graph is a set of nodes connected by edges.
binary search=Binary search finds a value in a sorted list by halving the range again and again.
sorting=Sorting puts elements in order, for example from small to large.
bubble sort=Bubble sort swaps neighbors that are in the wrong order until the list is sorted.
quicksort=Quicksort splits a list around a pivot and sorts both parts in the same way.
merge sort=Merge sort splits a list in halves, sorts them and merges the sorted halves.
big O notation=Big O notation describes how the cost of an algorithm grows with the size of its input.
dynamic programming=Dynamic programming solves a problem by storing the answers of smaller problems.
a database=A database stores data in an organized way so that it can be searched and changed.
a primary key=A primary key is a column whose value identifies each row of a table.
an index=An index is an extra structure that makes searching in a database table faster.
a transaction=A transaction is a group of database changes that happen all together or not at all.
a query=A query is a request for data from a database.
SQL=SQL is a language for reading and changing data in relational databases.
a server=A server is a program or computer that answers requests of other programs.
a client=A client is a program that sends requests to a server.
a browser=A browser is a program that loads and shows web pages.
HTML=HTML is the language that describes the structure of web pages.
CSS=CSS is the language that describes how web pages look.
JavaScript=JavaScript is a programming language that runs in web browsers and on servers.
Python=Python is a programming language that is known for simple and readable code.
C=C is a small and fast programming language that is close to the machine.
Rust=Rust is a fast programming language that checks memory safety when it compiles.
Java=Java is an object-oriented language that runs on a virtual machine.
HTTP=HTTP is the protocol that browsers and servers use to exchange web pages.
HTTPS=HTTPS is HTTP over an encrypted connection.
a URL=A URL is the address of a page or file on the web.
an IP address=An IP address is a number that identifies a device in a network.
DNS=DNS translates names like example.com into IP addresses.
a router=A router passes data packets from one network to another.
a firewall=A firewall blocks network traffic that is not allowed.
a cookie=A cookie is a small piece of data that a web site stores in the browser.
a cache=A cache keeps copies of data that is needed often so that it can be read faster.
an API=An API is the set of functions or requests through which programs talk to each other.
JSON=JSON is a text format for data made of objects, lists, strings and numbers.
XML=XML is a text format that marks data with nested tags.
a file system=A file system organizes files and folders on a disk.
an operating system=An operating system manages the hardware and runs the programs of a computer.
Linux=Linux is a free operating system kernel that is used on servers, phones and computers.
a kernel=A kernel is the core of an operating system that controls hardware and processes.
a process=A process is a running program with its own memory.
a thread=A thread is a sequence of instructions that runs inside a process.
a deadlock=A deadlock happens when two tasks wait for each other forever.
a race condition=A race condition is a bug where the result depends on the timing of tasks.
a mutex=A mutex is a lock that lets only one thread use a resource at a time.
concurrency=Concurrency means that several tasks make progress during the same time.
parallelism=Parallelism means that several tasks run at exactly the same time.
a CPU=A CPU is the part of a computer that executes instructions.
a GPU=A GPU is a processor with many small cores that work in parallel.
RAM=RAM is the fast memory that holds the data of running programs.
a hard disk=A hard disk stores data even when the computer is off.
an SSD=An SSD stores data in flash memory and has no moving parts.
a bit=A bit is the smallest unit of data and is either 0 or 1.
a byte=A byte is a group of eight bits.
binary=Binary is the number system that uses only the digits 0 and 1.
hexadecimal=Hexadecimal is the number system with sixteen digits, 0 to 9 and A to F.
ASCII=ASCII is a code that gives numbers to 128 characters.
Unicode=Unicode is a standard that gives a number to every character of every script.
UTF-8=UTF-8 stores Unicode characters in one to four bytes.
encryption=Encryption turns data into a form that only the owner of a key can read.
a password=A password is a secret text that proves who you are.
a bug=A bug is a mistake in a program.
debugging=Debugging means finding and fixing mistakes in a program.
a unit test=A unit test checks that a small piece of code does what it should.
refactoring=Refactoring improves the structure of code without changing what it does.
a library=A library is a collection of code that other programs can use.
a framework=A framework is a library that gives a program its basic structure.
a package manager=A package manager installs software packages and what they depend on.
Git=Git is a version control system that records the history of files.
a commit=A commit is a saved set of changes in version control.
a branch=A branch is a separate line of development in version control.
a merge=A merge joins the changes of two branches.
version control=Version control records changes to files so that you can go back to older versions.
open source=Open source means that everybody may read, use and change the source code.
a license=A license says what others may do with a work.
an exception=An exception is an error event that interrupts the normal flow of a program.
garbage collection=Garbage collection frees memory that a program no longer uses.
memory=Memory is the part of a computer that holds data and programs.
a memory leak=A memory leak happens when a program keeps memory that it no longer needs.
a regular expression=A regular expression is a pattern that describes a set of strings.
an event=An event is something that happens, like a key press, to which a program can react.
a callback=A callback is a function that is passed to other code to be called later.
a promise=A promise is an object that stands for a result that will be ready later.
a closure=A closure is a function that remembers the variables around it.
a lambda=A lambda is a small function without a name.
an iterator=An iterator gives the elements of a collection one after another.
a generator=A generator is a function that yields its values one at a time.
a decorator=A decorator is a function that wraps another function to change what it does.
a tuple=A tuple is an ordered collection that cannot be changed.
a dictionary=A dictionary maps keys to values.
a set=A set is a collection in which each element occurs only once.
a matrix=A matrix is a table of numbers in rows and columns.
a vector=A vector is a list of numbers that has a length and a direction.
a scalar=A scalar is a single number.
a tensor=A tensor is an array of numbers with any number of dimensions.
machine learning=Machine learning lets computers learn patterns from data instead of fixed rules.
deep learning=Deep learning is machine learning with neural networks that have many layers.
a neural network=A neural network is a model of simple connected units whose weights are learned from data.
a language model=A language model predicts the next piece of a text.
a token=A token is a small piece of text, such as a word or a part of a word.
a tokenizer=A tokenizer splits text into tokens and turns them into numbers.
attention=Attention lets a model weigh which earlier tokens matter for the current one.
a transformer=A transformer is a neural network that processes tokens with attention layers.
an embedding=An embedding is a vector that stands for a word, a token or another object.
training=Training adjusts the weights of a model so that its errors become smaller.
inference=Inference means using a trained model to compute answers.
a loss function=A loss function measures how wrong the output of a model is.
gradient descent=Gradient descent changes the weights step by step in the direction that lowers the loss.
backpropagation=Backpropagation computes how each weight of a network influences the loss.
overfitting=Overfitting means that a model learns the training data by heart and fails on new data.
a mixture of experts=A mixture of experts uses only a few of its subnetworks for each token.
speculative decoding=Speculative decoding lets a small model guess tokens that a large model then checks together.
quantization=Quantization stores numbers with fewer bits to save memory and time.
a learning rate=A learning rate says how large each training step is.
a batch=A batch is a group of examples that are processed together.
an epoch=An epoch is one pass over all the training data.
a chatbot=A chatbot is a program that answers people in natural language.
artificial intelligence=Artificial intelligence is the field of making machines do tasks that need intelligence.
a robot=A robot is a machine that can act in the world by a program.
a sensor=A sensor measures something, such as light or temperature.
latency=Latency is the time between a request and its answer.
throughput=Throughput is the amount of work done per unit of time.
bandwidth=Bandwidth is the amount of data that can be moved per second.
a pixel=A pixel is one colored dot of an image.
a screen=A screen is a surface that shows pictures and text.
a keyboard=A keyboard is a device with keys for typing.
a mouse=A mouse is a small device that moves the pointer, or a small animal.
the internet=The internet is a worldwide network that connects computers.
the web=The web is a system of linked pages that is used over the internet.
the cloud=The cloud means computers in data centers that are used over the internet.
email=Email is a system for sending messages over a network.
a virus=A virus is a tiny thing that makes living cells copy it, or a program that copies itself.
a backup=A backup is a copy of data that is kept in case the original is lost.
compression=Compression stores data in fewer bits.
a container=A container packs a program with everything it needs to run.
a virtual machine=A virtual machine is a computer that is simulated by software.
a terminal=A terminal is a window in which you type commands.
a shell=A shell is a program that reads commands and runs other programs.
a script=A script is a small program that automates a task.
a syntax error=A syntax error means that code does not follow the rules of the language.
a type=A type says what kind of value something is and what can be done with it.
a constant=A constant is a value that does not change.
a comment=A comment is text in code that is written for people and ignored by the computer.
a module=A module is a file of code that other code can import.
an argument=An argument is a value that is passed to a function.
a return value=A return value is the result that a function gives back.
gravity=Gravity is the force that pulls masses toward each other.
energy=Energy is the ability to do work or to cause change.
a force=A force is a push or a pull that changes how something moves.
mass=Mass is the amount of matter in an object.
speed=Speed says how far something moves in a given time.
acceleration=Acceleration says how quickly the speed changes.
temperature=Temperature says how hot or cold something is.
heat=Heat is energy that moves from a warm thing to a cold thing.
light=Light is radiation that our eyes can see.
sound=Sound is a wave of pressure that travels through air or other matter.
electricity=Electricity is the flow or the presence of electric charge.
a magnet=A magnet attracts iron and has two poles.
an atom=An atom is the smallest piece of a chemical element.
a molecule=A molecule is a group of atoms that are bound together.
an electron=An electron is a tiny particle with a negative charge.
a proton=A proton is a particle with a positive charge in the core of an atom.
a neutron=A neutron is a particle without charge in the core of an atom.
an element=An element is a substance whose atoms all have the same number of protons.
water=Water is a clear liquid made of hydrogen and oxygen.
ice=Ice is frozen water.
steam=Steam is water in the form of a gas.
oxygen=Oxygen is a gas in the air that people and animals need to breathe.
carbon=Carbon is an element that is part of all living things.
an acid=An acid is a substance that tastes sour and reacts with bases.
a metal=A metal is a shiny material that conducts electricity and heat well.
evaporation=Evaporation is the change of a liquid into a gas.
photosynthesis=Photosynthesis is how plants use light to make sugar from water and carbon dioxide.
a cell=A cell is the smallest unit of life.
DNA=DNA is the molecule that stores the plan of a living thing.
a gene=A gene is a piece of DNA that influences a trait.
evolution=Evolution is the change of living things over many generations.
a species=A species is a group of living things that can have young together.
a mammal=A mammal is an animal that feeds its young with milk.
a bird=A bird is an animal with feathers, wings and a beak.
a fish=A fish is an animal that lives in water and breathes with gills.
an insect=An insect is a small animal with six legs.
a plant=A plant is a living thing that makes its food from light.
a seed=A seed is a small part of a plant from which a new plant can grow.
a root=A root is the part of a plant that takes water from the ground.
a leaf=A leaf is a flat green part of a plant that catches light.
a flower=A flower is the part of a plant that makes seeds.
the heart=The heart is the organ that pumps blood through the body.
the brain=The brain is the organ with which we think, feel and control the body.
the lungs=The lungs are the organs with which we breathe.
blood=Blood is the red liquid that carries oxygen through the body.
a bone=A bone is a hard part of the skeleton.
a muscle=A muscle is a tissue that can pull and so moves the body.
a vaccine=A vaccine prepares the body to fight a disease.
bacteria=Bacteria are very small living things made of one cell.
sleep=Sleep is a state of rest for the body and the brain.
a planet=A planet is a large round body that moves around a star.
a star=A star is a huge ball of hot gas that gives off light.
the Sun=The Sun is the star at the center of our Solar System.
the Moon=The Moon is the round body that moves around the Earth.
a galaxy=A galaxy is a huge group of stars held together by gravity.
a comet=A comet is a ball of ice and dust that moves around the Sun.
a black hole=A black hole is a place where gravity is so strong that not even light can leave.
an eclipse=An eclipse happens when one body in space hides another one.
an orbit=An orbit is the path of a body around another body in space.
a satellite=A satellite is a body that moves around a planet.
a telescope=A telescope makes things that are far away look larger.
a microscope=A microscope makes very small things visible.
weather=Weather is the state of the air at a place and time.
climate=Climate is the usual weather of a place over many years.
rain=Rain is water that falls in drops from clouds.
snow=Snow is frozen water that falls in flakes from clouds.
wind=Wind is moving air.
a cloud=A cloud is a group of tiny drops of water in the air.
a storm=A storm is bad weather with strong wind and often rain.
a rainbow=A rainbow is an arc of colors that appears when the sun shines on rain.
lightning=Lightning is a bright electric flash in a storm.
a volcano=A volcano is an opening in the ground from which hot melted rock comes out.
an earthquake=An earthquake is a sudden shaking of the ground.
a mountain=A mountain is very high ground.
a river=A river is a stream of water that flows to the sea or a lake.
an ocean=An ocean is a very large body of salt water.
an island=An island is land with water all around it.
a desert=A desert is a dry place with very few plants.
a forest=A forest is a large area with many trees.
a continent=A continent is one of the large land areas of the Earth.
a map=A map is a drawing that shows where places are.
a compass=A compass shows which way is north.
a number=A number tells how many or how much.
a fraction=A fraction is a part of a whole, written as one number over another.
a percentage=A percentage is a part of one hundred.
an average=An average is the sum of values divided by how many there are.
a median=A median is the middle value of a sorted list.
probability=Probability is a number from 0 to 1 that says how likely something is.
a prime number=A prime number is a number above 1 that is divisible only by 1 and itself.
an even number=An even number is a whole number that is divisible by 2.
an odd number=An odd number is a whole number that is not divisible by 2.
a square root=A square root of a number is a value that gives the number when multiplied by itself.
a factorial=The factorial of n is the product of all whole numbers from 1 to n.
the Fibonacci sequence=The Fibonacci sequence starts with 0 and 1, and each next number is the sum of the last two.
an equation=An equation says that two expressions have the same value.
algebra=Algebra is the part of mathematics that works with symbols for numbers.
geometry=Geometry is the part of mathematics about shapes and space.
a triangle=A triangle is a shape with three sides.
a circle=A circle is a round line whose points all have the same distance from the center.
a square=A square is a shape with four equal sides and four right angles.
an angle=An angle is the space between two lines that meet.
a derivative=A derivative says how fast the value of a function changes.
an integral=An integral adds up infinitely many small parts, such as the area under a curve.
statistics=Statistics is the science of collecting and understanding data.
logic=Logic is the study of correct reasoning.
a proof=A proof is an argument that shows that a statement must be true.
money=Money is what people use to pay for things.
a bank=A bank is a company that keeps and lends money.
a tax=A tax is money that people and companies pay to the state.
inflation=Inflation means that prices rise and money buys less.
a budget=A budget is a plan for how to spend money.
democracy=Democracy is a form of government in which the people choose who rules.
a law=A law is a rule that is made by the state.
a city=A city is a large place where many people live.
a school=A school is a place where children learn.
a library card=A library card lets you borrow books.
a book=A book is a set of pages with text or pictures.
a poem=A poem is a text that uses rhythm, sound and images.
a novel=A novel is a long story in a book.
a metaphor=A metaphor describes one thing as if it were another.
a noun=A noun is a word for a person, a place or a thing.
a verb=A verb is a word for an action or a state.
an adjective=An adjective is a word that describes a noun.
a sentence=A sentence is a group of words that expresses a complete thought.
grammar=Grammar is the set of rules of a language.
music=Music is sound arranged in a pleasing way.
a piano=A piano is a musical instrument with keys and strings.
a guitar=A guitar is a musical instrument with six strings.
chess=Chess is a board game for two players with the goal to trap the king.
Tetris=Tetris is a game in which you arrange falling blocks to fill rows.
football=Football is a game in which two teams try to get a ball into a goal.
bread=Bread is a food that is baked from flour and water.
cheese=Cheese is a food that is made from milk.
honey=Honey is a sweet food that bees make from flowers.
coffee=Coffee is a drink made from roasted beans.
tea=Tea is a drink made from leaves and hot water.
a clock=A clock shows the time.
a calendar=A calendar shows the days, weeks and months of a year.
a car=A car is a vehicle with four wheels and a motor.
a train=A train is a row of connected wagons that moves on rails.
a bicycle=A bicycle is a vehicle with two wheels that you move with your feet.
a ship=A ship is a large boat that travels over the sea.
an airplane=An airplane is a vehicle with wings that flies.
a bridge=A bridge is a way over a river, a road or a valley.
friendship=Friendship is a bond between people who like and help each other.
happiness=Happiness is the feeling of being glad.
courage=Courage is the strength to do something although you are afraid.
patience=Patience is the ability to wait calmly.
deepdraft=deepdraft is an inference engine for DeepSeek models, and I am its small demo model.
"""
ASK = (
    "What is {t}?", "What is {t}?", "Explain {b} in one sentence.", "Explain {t} in one sentence.", "Explain {b}.",
    "What does {b} mean?", "Tell me what {t} is.", "Can you explain what {t} is?", "What's {t}?", "Define {b}.",
    "Describe {t} in one sentence.", "Give me a short explanation of {b}.", "In one sentence, what is {t}?",
    "Do you know what {t} is?", "explain {b} simply", "How would you explain {b} to a child?",
)  # fmt: skip
PLURAL = ("the lungs", "bacteria")


def bare_name(term: str) -> str:
    """The term without its article."""
    return term.removeprefix("a ").removeprefix("an ").removeprefix("the ")


def items(rng: random.Random, count: int) -> Iterator[Item]:
    """`count` questions about terms, a few with a second term as a follow-up."""
    rows = [line.split("=", 1) for line in TABLE.strip().split("\n")]
    for _ in range(count):
        term, text = pick(rng, rows)
        bare = bare_name(term)
        ask = pick(rng, ASK).format(t=term, b=bare)
        if term in PLURAL:
            ask = ask.replace("What is", "What are").replace("what is", "what are")
        turns = [vary(rng, ask)]
        if rng.random() < 0.12:
            other, other_text = pick(rng, rows)
            turns = [
                ask,
                text,
                pick(rng, ("And {t}?", "What about {t}?", "And what is {t}?")).format(t=other),
            ]
            text, bare = other_text, other
        think = pick(
            rng,
            ("The user asks about {b}. One sentence is enough.", "I explain {b} in one sentence."),
        )
        yield Item("terms", turns, text, think.format(b=bare), key=ask)
