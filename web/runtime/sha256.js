/**
 * @file SHA-256 (FIPS 180-4) as bytes go by.
 *
 * `crypto.subtle` is several times faster, but it is asynchronous and takes whole buffers only. Where a digest is
 * wanted at once (the hash of a small document) or of more than fits into memory (a file as it is written), this is it.
 */

// The first 32 bits of the fractional parts of the square roots of the first 8 primes, and of the cube roots of the
// first 64. None of them is so near to a whole number of 2^-32 that the last bit of Math.cbrt could matter.
const PRIMES = firstPrimes(64);
const START = Int32Array.from(PRIMES.slice(0, 8), (prime) => fraction(Math.sqrt(prime)));
const CONSTANTS = Int32Array.from(PRIMES, (prime) => fraction(Math.cbrt(prime)));

const BLOCK = 64;

/** Feed bytes to `update` in order, then take `hex`. */
export class Sha256 {
  #state = START.slice();
  #schedule = new Int32Array(64);
  #partial = new Uint8Array(BLOCK);
  #size = 0;

  /**
   * @param {Uint8Array} bytes
   * @returns {this}
   */
  update(bytes) {
    let used = this.#size % BLOCK;
    let position = 0;
    this.#size += bytes.length;
    if (used) {
      position = Math.min(BLOCK - used, bytes.length);
      this.#partial.set(bytes.subarray(0, position), used);
      used += position;
      if (used < BLOCK) return this;
      this.#absorb(this.#partial, 0);
    }
    for (; position + BLOCK <= bytes.length; position += BLOCK) this.#absorb(bytes, position);
    this.#partial.set(bytes.subarray(position));
    return this;
  }

  /**
   * The digest of everything so far, as 64 hex digits. More may follow.
   *
   * @returns {string}
   */
  hex() {
    const copy = new Sha256();
    copy.#state.set(this.#state);
    const used = this.#size % BLOCK;
    const tail = new Uint8Array(used < BLOCK - 8 ? BLOCK : 2 * BLOCK);
    tail.set(this.#partial.subarray(0, used));
    tail[used] = 0x80;
    // The length in bits as 64-bit big-endian: size * 8 is beyond 2^53 only for files of a petabyte.
    const view = new DataView(tail.buffer);
    view.setUint32(tail.length - 8, Math.floor(this.#size / 2 ** 29));
    view.setUint32(tail.length - 4, (this.#size % 2 ** 29) * 8);
    for (let position = 0; position < tail.length; position += BLOCK) copy.#absorb(tail, position);
    return Array.from(copy.#state, (word) => (word >>> 0).toString(16).padStart(8, "0")).join("");
  }

  /**
   * @param {Uint8Array} bytes
   * @param {number} at where the block begins
   */
  #absorb(bytes, at) {
    const w = this.#schedule;
    const state = this.#state;
    for (let i = 0, p = at; i < 16; i++, p += 4) {
      w[i] = (bytes[p] << 24) | (bytes[p + 1] << 16) | (bytes[p + 2] << 8) | bytes[p + 3];
    }
    // `| 0` after each sum keeps engines in 32-bit arithmetic.
    for (let i = 16; i < 64; i++) {
      const x = w[i - 15];
      const y = w[i - 2];
      const low = ((x >>> 7) | (x << 25)) ^ ((x >>> 18) | (x << 14)) ^ (x >>> 3);
      const high = ((y >>> 17) | (y << 15)) ^ ((y >>> 19) | (y << 13)) ^ (y >>> 10);
      w[i] = (((w[i - 16] + low) | 0) + ((w[i - 7] + high) | 0)) | 0;
    }
    let a = state[0];
    let b = state[1];
    let c = state[2];
    let d = state[3];
    let e = state[4];
    let f = state[5];
    let g = state[6];
    let h = state[7];
    for (let i = 0; i < 64; i++) {
      const high = ((e >>> 6) | (e << 26)) ^ ((e >>> 11) | (e << 21)) ^ ((e >>> 25) | (e << 7));
      const choice = g ^ (e & (f ^ g));
      const first = (((h + high) | 0) + ((choice + ((CONSTANTS[i] + w[i]) | 0)) | 0)) | 0;
      const low = ((a >>> 2) | (a << 30)) ^ ((a >>> 13) | (a << 19)) ^ ((a >>> 22) | (a << 10));
      const second = (low + ((a & b) | (c & (a | b)))) | 0;
      h = g;
      g = f;
      f = e;
      e = (d + first) | 0;
      d = c;
      c = b;
      b = a;
      a = (first + second) | 0;
    }
    state[0] += a;
    state[1] += b;
    state[2] += c;
    state[3] += d;
    state[4] += e;
    state[5] += f;
    state[6] += g;
    state[7] += h;
  }
}

/**
 * The sha256 of bytes that are in memory, at once.
 *
 * @param {Uint8Array} bytes
 * @returns {string} 64 hex digits
 */
export function sha256(bytes) {
  return new Sha256().update(bytes).hex();
}

/**
 * The same from `crypto.subtle`: for large pieces, off the calling thread. The bytes may not change meanwhile.
 *
 * @param {Uint8Array<ArrayBuffer>} bytes
 * @returns {Promise<string>} 64 hex digits
 */
export async function subtleSha256(bytes) {
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** @param {number} count @returns {number[]} */
function firstPrimes(count) {
  /** @type {number[]} */
  const primes = [];
  for (let candidate = 2; primes.length < count; candidate++) {
    if (primes.every((prime) => candidate % prime)) primes.push(candidate);
  }
  return primes;
}

/** @param {number} root @returns {number} the first 32 bits of its fractional part */
function fraction(root) {
  return Math.floor((root % 1) * 2 ** 32);
}
