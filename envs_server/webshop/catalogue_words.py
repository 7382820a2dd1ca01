"""Words of the synthetic catalogue; what stands here decides on its bytes."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Kind:
  """One of the five kinds of product that the published data hold.

  Attributes:
    root: first part of `product_category`.
    types: (name, group, profile of its options) of each type of product.
    is_: attributes that stand before a noun: a `long lasting` lipstick.
    easy: that follow `that is`.
    use: that follow `for`.
    has: that follow `with`.
    materials: what products are made of.
  """

  root: str
  types: tuple[tuple[str, str, str], ...]
  is_: tuple[str, ...]
  easy: tuple[str, ...]
  use: tuple[str, ...]
  has: tuple[str, ...]
  materials: tuple[str, ...]


def _split(text: str) -> tuple[str, ...]:
  return tuple(' '.join(part.split()) for part in text.split(','))


def _types(text: str) -> tuple[tuple[str, str, str], ...]:
  """Reads lines `group | profile | type, type, ...`."""
  found = []
  for line in text.strip().split('\n'):
    group, profile, names = (part.strip() for part in line.split('|'))
    found += [(name, group, profile) for name in _split(names)]
  return tuple(found)


KINDS = {
  'beauty': Kind(
    'Beauty & Personal Care',
    _types("""
Makeup | shade | lipstick, mascara, eyeliner, concealer, foundation, blush, \
highlighter, eyebrow pencil, lip gloss, eyeshadow palette, nail polish
Skin Care | scent | face cream, body lotion, facial serum, sunscreen, \
face mask, body scrub, lip balm, eye cream, cleanser, toner
Hair Care | scent | shampoo, conditioner, hair mask, hair oil, dry shampoo
Hair Pieces | shade | hair extensions, lace front wig, hair clips, ponytail
Tools & Accessories | style | makeup brush set, hair brush, nail file, \
tweezers, makeup bag, hair dryer, toothbrush, razor
"""),
    _split(
      'long lasting, alcohol free, cruelty free, paraben free, sulfate free, '
      'fragrance free, oil free, dermatologist tested, anti aging, water '
      'resistant, high quality, clinically proven, non toxic, bpa free, '
      'hypoallergenic, highly pigmented, travel size, eco friendly'
    ),
    _split('easy to use, easy to apply, easy to clean, easy to carry'),
    _split(
      'sensitive skin, dry skin, dry hair, damaged hair, fine lines, dark '
      'circles, hair growth, dead skin, oily skin, natural hair, hair salon, '
      'nail art, acne prone skin'
    ),
    _split(
      'hyaluronic acid, natural ingredients, argan oil, tea tree, coconut oil, '
      'vitamin c, green tea, shea butter, aloe vera'
    ),
    _split('Botanical, Mineral, Keratin, Silk, Bamboo, Velvet, Satin, Matte'),
  ),
  'electronics': Kind(
    'Electronics',
    _types("""
Headphones | device | earbuds, over ear headphones, headset, neckband
Computers & Accessories | device | laptop sleeve, wireless mouse, mechanical \
keyboard, tablet stand, webcam, desktop computer, docking station, monitor
Cables & Adapters | cable | hdmi cable, usb cable, coaxial cable, charging \
cable, ethernet cable, audio adapter, extension cord
Camera & Photo | device | camera bag, tripod, ring light, camera lens cap, \
photo backdrop, security camera, digital camera, binoculars
Television & Video | device | tv mount, projector screen, remote control, \
streaming player, soundbar, portable projector
Cell Phones | phone | phone case, screen protector, smartwatch band, car \
charger, power bank, phone holder, wireless charger
"""),
    _split(
      'fast charging, high speed, noise cancelling, heavy duty, gold plated, '
      'high definition, ultra hd, plug and play, hands free, high performance, '
      'water resistant, wall mounted, light weight, long lasting, dust proof, '
      'tempered glass, quad core, high resolution'
    ),
    _split('easy to use, easy to install, easy to carry, easy to clean'),
    _split(
      'home theater, video calls, office work, blu ray, car audio, outdoor '
      'travel, night vision, vinyl records, gaming consoles, digital '
      'photography, dvd players'
    ),
    _split(
      'usb port, stereo sound, batteries included, carrying case, optical '
      'zoom, aluminum alloy, motion detection, surround sound, 1080p hd'
    ),
    _split('Aluminum, Carbon, Nylon, Silicone, Leather, Steel, Acrylic, Mesh'),
  ),
  'fashion': Kind(
    'Clothing, Shoes & Jewelry',
    _types("""
Women's Shoes | shoe | women's sandals, women's ankle boots, women's \
sneakers, women's pumps, women's slippers, women's loafers
Men's Shoes | shoe | men's loafers, men's sneakers, men's work boots, \
men's oxfords, men's slippers
Women's Clothing | garment | women's dress, women's blouse, women's \
leggings, women's cardigan, women's jumpsuit, women's skirt, women's \
swimsuit, women's coat
Men's Clothing | garment | men's dress shirt, men's polo, men's t-shirt, \
men's jeans, men's hoodie, men's shorts, men's vest, men's sleepwear
Underwear | garment | sports bra, boxer briefs, pajama set, thermal underwear, \
robe
Accessories | colour | handbag, backpack, leather belt, wrist watch, \
sunglasses, scarf, bucket hat, wallet, jewelry box
"""),
    _split(
      'machine washable, hand washable, slim fit, loose fit, relaxed fit, '
      'wide leg, high waist, long sleeve, short sleeve, moisture wicking, '
      'quick drying, slip resistant, straight leg, tummy control, light '
      'weight, regular fit, water resistant, high quality'
    ),
    _split('easy to wear, easy to wash, easy to match, comfortable to wear'),
    _split(
      'daily wear, everyday wear, gym workout, evening party, beach holidays, '
      'formal work, winter walks, teen girls, outdoor hiking, wedding guests'
    ),
    _split(
      'rubber sole, elastic waist, button closure, arch support, memory foam, '
      'drawstring closure, ankle strap, polyester spandex, unique design, '
      'zipper pockets'
    ),
    _split('Cotton, Linen, Denim, Suede, Wool, Faux Leather, Fleece, Knit'),
  ),
  'garden': Kind(
    'Home & Kitchen',
    _types("""
Bedding | bed | duvet cover, comforter set, sheet set, bed skirt, quilt, \
mattress topper, weighted blanket
Furniture | furniture | ottoman, bar stool, sofa, coffee table, bookshelf, \
nightstand, tv stand, dining chair, desk, bed frame, console table, bench
Wall & Window | panel | curtain panels, wall art, roman shades, shower \
curtain, window film, tapestry, wall mirror, area rug
Lighting | colour | pendant light, table lamp, floor lamp, wall sconce, \
string lights, chandelier, candle holder
Decor & Storage | colour | throw pillow covers, storage basket, wine rack, \
flower vase, soy candle, laundry hamper, coat rack, planter
"""),
    _split(
      'machine washable, space saving, heavy duty, hand painted, assembly '
      'required, easy care, fully assembled, spot clean, lead free, mid '
      'century, eco friendly, ready to hang, super soft, button tufted, '
      'height adjustable, contemporary style, fade resistant, double sided'
    ),
    _split(
      'easy to assemble, easy to clean, easy to install, easy to hang, easy '
      'to move'
    ),
    _split(
      'living room, dining room, small spaces, guest bedroom, home office, '
      'patio garden, kids room, farmhouse kitchen, entryway, hotel suites'
    ),
    _split(
      'solid wood, storage space, stainless steel, metal legs, tempered '
      'glass, memory foam, glass shade, non slip backing, engineered wood'
    ),
    _split('Oak, Walnut, Velvet, Linen, Rattan, Marble, Brass, Bamboo, Cotton'),
  ),
  'grocery': Kind(
    'Grocery & Gourmet Food',
    _types("""
Snacks | food | granola bars, popcorn, tortilla chips, beef jerky, trail mix, \
rice crackers, pretzels, fruit snacks, mixed nuts, cookies
Beverages | food | ground coffee, green tea bags, sparkling water, hot cocoa \
mix, protein shake, fruit juice, herbal tea, energy drink
Pantry | food | olive oil, pasta sauce, baking mix, black beans, instant \
noodles, peanut butter, maple syrup, brown rice, breakfast cereal, canned tuna
Spices & Seasonings | food | sea salt, black pepper, taco seasoning, vanilla \
extract, hot sauce, cinnamon powder, bbq rub
Candy & Chocolate | food | dark chocolate, gummy bears, hard candy, caramels, \
mints, lollipops, chocolate truffles
"""),
    _split(
      'gluten free, sugar free, dairy free, fat free, low sodium, low carb, '
      'non gmo, usda organic, keto friendly, plant based, soy free, nut free, '
      'high protein, certified kosher, ready to eat, shelf stable, bpa free, '
      'freeze dried, individually wrapped, caffeine free'
    ),
    _split('easy to prepare, easy to use, quick to cook, easy to store'),
    _split(
      'birthday parties, baby showers, gift giving, school lunches, road '
      'trips, weight loss, family dinners, holiday baskets, office breaks'
    ),
    _split(
      'natural ingredients, real fruit, dietary fiber, no artificial colors, '
      'high fructose free recipe, simple ingredients, zero trans fat, '
      'natural flavors'
    ),
    _split('Roasted, Smoked, Stone Ground, Toasted, Raw, Dried, Whole, Crispy'),
  ),
}

COLOURS = _split(
  'Black, White, Red, Navy Blue, Royal Blue, Forest Green, Olive, Khaki, '
  'Burgundy, Charcoal, Light Grey, Dark Grey, Ivory, Beige, Champagne, Rose '
  'Gold, Silver, Dusty Pink, Hot Pink, Coral, Teal, Turquoise, Lavender, Plum, '
  'Mustard, Rust, Camel, Taupe, Espresso, Mint, Peach, Magenta'
)
SHADES = _split(
  '01 Nude, 02 Rosewood, 03 Mauve, 04 Terracotta, 05 Brick, 06 Cinnamon, 07 '
  'Porcelain, 08 Honey, 1b Off Black, 2 Darkest Brown, 4 Medium Brown, 6 '
  'Chestnut, 8 Ash Brown, 10 Golden Blonde, 27 Strawberry Blonde, 99j Wine, '
  'Natural Beige, Warm Ivory, Deep Espresso, Classic Red, Soft Coral'
)
SCENTS = _split(
  'Lavender, Eucalyptus Mint, Coconut Vanilla, Unscented, Cherry Blossom, '
  'Citrus Grove, Sandalwood, Rose Water, Cucumber Melon, Green Apple'
)
FLAVOURS = _split(
  'Original, Sea Salt, Dark Cocoa, Vanilla Bean, Honey Mustard, Spicy Chili, '
  'Lemon Lime, Wild Berry, Peanut Butter, Salted Caramel, Apple Cinnamon, '
  'Maple Pecan, Garlic & Herb, Sweet Onion, Mango Habanero, Mint Chip'
)
STYLES = _split(
  'Classic, Deluxe, Compact, Travel Kit, Starter Set, Professional, Twin '
  'Bundle, Gift Box, Basic, Premium'
)
# Profile: the groups of options in their order, each with its values.
PROFILES = {
  'shade': (
    ('Color', SHADES),
    ('Size', _split('1 Count, 2 Count, 0.12 Ounce')),
  ),
  'scent': (
    ('Scent', SCENTS),
    ('Size', _split('2 Fl Oz, 4 Fl Oz, 8.5 Fl Oz, 12 Ounce, 1.7 Ounce')),
  ),
  'style': (('Style', STYLES), ('Color', COLOURS)),
  'device': (('Color', COLOURS), ('Style', STYLES)),
  'cable': (
    ('Size', _split('1.5 Feet, 3 Feet, 6 Feet, 10 Feet, 15 Feet, 25 Feet')),
    ('Color', COLOURS),
    ('Item Package Quantity', _split('1, 2, 3, 5')),
  ),
  'phone': (
    ('Color', COLOURS),
    ('Size', _split('5.4 Inch, 6.1 Inch, 6.5 Inch, 6.7 Inch, 38mm, 42mm')),
  ),
  'shoe': (
    (
      'Size',
      _split(
        '5, 5.5, 6, 6.5, 7, 7 Wide, 7.5, 8, 8 Wide, 8.5, 9, 9 Wide, 9.5, 10, '
        '10.5 Narrow, 11, 12 Women/10 Men'
      ),
    ),
    ('Color', COLOURS),
  ),
  'garment': (
    ('Fit Type', _split('Regular, Tall, Petite')),
    (
      'Size',
      _split(
        'X-Small, Small, Medium, Large, X-Large, XX-Large, 3X-Large, 30W x '
        '32L, 34W x 30L, 36W x 34L'
      ),
    ),
    ('Color', COLOURS),
  ),
  'colour': (('Color', COLOURS),),
  'bed': (
    ('Size', _split('Twin, Twin XL, Full, Queen, King, California King')),
    ('Color', COLOURS),
  ),
  'furniture': (
    ('Color', COLOURS),
    ('Size', _split('24 Inch, 30 Inch, 36 Inch, 48 Inch, Set of 2, Set of 4')),
  ),
  'panel': (
    (
      'Size',
      _split(
        '18x18 Inch, 24"W x 36"L, 36x48 Inch, 42"W x 63"L, 52"W x 84"L, 72x72 '
        'Inch, 2 x 3 ft, 5 x 8 ft'
      ),
    ),
    ('Color', COLOURS),
  ),
  'food': (
    ('Flavor Name', FLAVOURS),
    (
      'Size',
      _split(
        '6 Ounce (Pack of 1), 8 Ounce (Pack of 3), 12 Ounce (Pack of 6), 1 '
        'Pound (Pack of 2), 2.5 Ounce (Pack of 12), 5 Pound'
      ),
    ),
  ),
}
# Two letters each, so that three of them never make the same brand twice.
SYLLABLES = tuple(
  consonant + vowel for consonant in 'bdfgklmnprstvz' for vowel in 'aeiou'
)[:64]
ENDINGS = ('', 'n', 'x', 'l', 'm')

# The rest is for plain catalogues.
PLAIN_BRANDS = _split(
  'Acme, Apex, Arlo, Aster, Basin, Birch, Bolt, Bravo, Brook, Cedar, Cliff, '
  'Comet, Coral, Crest, Delta, Dune, Eagle, Echo, Ember, Falcon, Fern, Field, '
  'Flint, Fox, Frost, Glade, Grove, Harbor, Hawk, Heron, Iris, Ivy, Jade, '
  'Juno, Kite, Lark, Lotus, Lynx, Maple, Mesa, Nova, Oasis, Onyx, Orbit, '
  'Otter, Pearl, Pine, Polar, Prime, Quill, Raven, Reef, Ridge, Robin, Sage, '
  'Sierra, Solar, Tiger, Vista, Wren'
)
PLAIN_WORDS = _split(
  'soft, warm, light, strong, thin, thick, simple, modern, classic, small, '
  'portable, durable, washable, stylish, elegant, smooth, handmade, foldable, '
  'compact, natural, cheap, heavy, quiet, bright, round, square, wide, long, '
  'short, plain, premium, sturdy, flexible, tidy, fresh, fancy, vintage, '
  'sleek, cozy, handy'
)
# Kind: materials, groups of options of its types, uses, types.
PLAIN_KINDS = {
  'beauty': (
    _split('organic, herbal, mineral, vegan'),
    ('scent', 'count'),
    _split('men, women, travel'),
    _split(
      'shampoo, lotion, soap, perfume, lipstick, mascara, cleanser, sunscreen, '
      'toner, deodorant'
    ),
  ),
  'electronics': (
    _split('metal, plastic, leather, rubber'),
    ('colour', 'length'),
    _split('home, office, travel'),
    _split(
      'cable, charger, mouse, keyboard, speaker, tripod, headset, case, '
      'adapter, webcam'
    ),
  ),
  'fashion': (
    _split('cotton, linen, wool, denim'),
    ('size', 'colour'),
    _split('men, women, kids'),
    _split(
      'shirt, dress, jacket, sweater, skirt, hoodie, coat, vest, robe, hat'
    ),
  ),
  'garden': (
    _split('wooden, bamboo, glass, steel'),
    ('colour', 'length'),
    _split('bedroom, kitchen, patio'),
    _split(
      'lamp, table, chair, shelf, rug, mirror, vase, bench, stool, basket'
    ),
  ),
  'grocery': (
    _split('roasted, salted, dried, smoked'),
    ('flavour', 'count'),
    _split('kids, breakfast, parties'),
    _split(
      'coffee, tea, granola, popcorn, jerky, cereal, chocolate, juice, soup, '
      'sauce'
    ),
  ),
}
PLAIN_OPTIONS = {
  'scent': ('scent', _split('rose, mint, lemon, vanilla, coconut, apple')),
  'count': ('size', _split('1 pack, 2 pack, 4 pack, 6 pack')),
  'colour': (
    'color',
    _split('red, blue, green, black, white, gray, pink, brown'),
  ),
  'length': ('size', _split('1 foot, 3 feet, 6 feet, 9 feet')),
  'size': ('size', _split('small, medium, large, x-large')),
  'flavour': (
    'flavor name',
    _split('honey, cherry, ginger, garlic, maple, lime'),
  ),
}
