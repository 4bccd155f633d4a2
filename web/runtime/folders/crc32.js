/** @file CRC-32 (ISO 3309), which zip files carry. May import: nothing. */

// Row 0 is the checksum of each byte; row n that of the byte with n zeros after it, so that eight bytes go at a time.
const TABLES = Array.from({ length: 8 }, () => new Int32Array(256));
for (let byte = 0; byte < 256; byte++) {
  let value = byte;
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  TABLES[0][byte] = value;
}
for (let row = 1; row < 8; row++) {
  for (let byte = 0; byte < 256; byte++) {
    const before = TABLES[row - 1][byte];
    TABLES[row][byte] = (before >>> 8) ^ TABLES[0][before & 255];
  }
}
const [T0, T1, T2, T3, T4, T5, T6, T7] = TABLES;

/**
 * @param {Uint8Array} bytes
 * @param {number} [before] the checksum of the bytes in front of these
 * @returns {number} of all of them
 */
export function crc32(bytes, before = 0) {
  let value = ~before;
  let at = 0;
  for (; at + 8 <= bytes.length; at += 8) {
    value ^= bytes[at] | (bytes[at + 1] << 8) | (bytes[at + 2] << 16) | (bytes[at + 3] << 24);
    value =
      T7[value & 255] ^
      T6[(value >>> 8) & 255] ^
      T5[(value >>> 16) & 255] ^
      T4[value >>> 24] ^
      T3[bytes[at + 4]] ^
      T2[bytes[at + 5]] ^
      T1[bytes[at + 6]] ^
      T0[bytes[at + 7]];
  }
  for (; at < bytes.length; at++) value = T0[(value ^ bytes[at]) & 255] ^ (value >>> 8);
  return ~value >>> 0;
}
