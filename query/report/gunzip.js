// Gzip, unpacked on the spot. What browsers bring for it answers only after the page counts as loaded, and a picture or a
// print may be taken before. RFC 1951 and 1952, for one member with nothing in its header, as Python writes it.

const LENGTHS = [3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258];
const LENGTH_BITS = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0];
const DISTANCES = [
  1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289,
  16385, 24577,
];
const ORDER = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15]; // in which lengths of codes of lengths come
const HEAD_BYTES = 10;
const END_OF_BLOCK = 256;
const DAMAGED = "the data of the charts is damaged";

// A Huffman code: the next bits of the stream, as many as the longest word has, lead to a symbol and the length of its word.
function makeCode(lengths) {
  const longest = Math.max(...lengths);
  const table = new Uint16Array(1 << longest);
  let word = 0;
  for (let length = 1; length <= longest; length += 1) {
    lengths.forEach((own, symbol) => {
      if (own !== length) return;
      let first = 0; // a word comes with its highest bit first
      for (let bit = 0; bit < length; bit += 1) first |= ((word >> bit) & 1) << (length - 1 - bit);
      for (let at = first; at < table.length; at += 1 << length) table[at] = (symbol << 4) | length;
      word += 1;
    });
    word <<= 1;
  }
  return { table, longest };
}

function gunzip(bytes) {
  if (bytes[0] !== 31 || bytes[1] !== 139 || bytes[3] !== 0) throw new Error(DAMAGED);
  const unpacked = new Uint8Array(new DataView(bytes.buffer).getUint32(bytes.length - 4, true));
  let [at, held, bits, end] = [HEAD_BYTES, 0, 0, 0]; // `held` has the next `bits` bits, `end` is where the next byte goes

  const hold = (count) => {
    if (at > bytes.length) throw new Error(DAMAGED);
    for (; bits < count; bits += 8) held |= bytes[(at += 1) - 1] << bits;
  };
  const take = (count) => {
    hold(count);
    const value = held & ((1 << count) - 1);
    held >>>= count;
    bits -= count;
    return value;
  };
  const next = ({ table, longest }) => {
    hold(longest);
    const found = table[held & (table.length - 1)];
    if (found === 0) throw new Error(DAMAGED);
    held >>>= found & 15;
    bits -= found & 15;
    return found >> 4;
  };
  const codesInBlock = () => {
    const [symbols, distances, count] = [take(5) + 257, take(5) + 1, take(4) + 4];
    const ofLengths = new Array(19).fill(0);
    for (let place = 0; place < count; place += 1) ofLengths[ORDER[place]] = take(3);
    const code = makeCode(ofLengths);
    const lengths = [];
    while (lengths.length < symbols + distances) {
      const symbol = next(code);
      if (symbol < 16) lengths.push(symbol);
      else {
        const [value, times] = symbol === 16 ? [lengths.at(-1), take(2) + 3] : [0, symbol === 17 ? take(3) + 3 : take(7) + 11];
        for (let time = 0; time < times; time += 1) lengths.push(value);
      }
    }
    return [makeCode(lengths.slice(0, symbols)), makeCode(lengths.slice(symbols))];
  };
  const fixedCodes = () => {
    const lengths = Array.from({ length: 288 }, (_, symbol) => (symbol < 144 ? 8 : symbol < 256 ? 9 : symbol < 280 ? 7 : 8));
    return [makeCode(lengths), makeCode(new Array(30).fill(5))];
  };

  for (let isLast = false; !isLast; ) {
    isLast = take(1) === 1;
    const kind = take(2);
    if (kind === 0) {
      take(bits & 7);
      const length = take(16);
      take(16);
      for (let byte = 0; byte < length; byte += 1) unpacked[(end += 1) - 1] = take(8);
      continue;
    }
    const [symbols, distances] = kind === 1 ? fixedCodes() : codesInBlock();
    for (let symbol = next(symbols); symbol !== END_OF_BLOCK; symbol = next(symbols)) {
      if (symbol < END_OF_BLOCK) unpacked[(end += 1) - 1] = symbol;
      else {
        const length = LENGTHS[symbol - 257] + take(LENGTH_BITS[symbol - 257]);
        const far = next(distances);
        const from = end - DISTANCES[far] - take(far < 4 ? 0 : (far >> 1) - 1);
        for (let byte = 0; byte < length; byte += 1) unpacked[end + byte] = unpacked[from + byte];
        end += length;
      }
    }
  }
  if (end !== unpacked.length) throw new Error(DAMAGED);
  return unpacked;
}
