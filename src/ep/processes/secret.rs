//! Proof that both sides of a connection know the same secret, without sending it.
#![forbid(unsafe_code)]

use std::fmt;
use std::fs::File;
use std::io::Read;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// Bytes of a nonce, of a proof and of a secret that the launcher makes (spec: the output of SHA-256).
pub(crate) const NUM_BYTES: usize = 32;
/// Block of SHA-256 (spec: FIPS 180-4), which HMAC pads the key to (spec: RFC 2104).
const BLOCK_BYTES: usize = 64;

/// What only the ranks of a job know. Never printed.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(String);

/// A number that is used once, or a proof.
pub(crate) type Bytes = [u8; NUM_BYTES];

impl Secret {
    /// A new one, from the system's random numbers.
    ///
    /// # Errors
    /// `Io` when the system has none.
    pub fn random() -> Result<Self> {
        Ok(Secret(nonce()?.map(|b| format!("{b:02x}")).concat()))
    }

    /// The secret of that text, as [`to_text`](Self::to_text) writes it or any other of 16 characters and more.
    ///
    /// # Errors
    /// `Invalid` for a text so short that it can be guessed.
    pub fn from_text(text: &str) -> Result<Self> {
        const LEAST: usize = 16; // arbitrary: 64 bits written as hexadecimal digits
        match text.len() >= LEAST {
            true => Ok(Secret(text.to_owned())),
            false => Err(Error::invalid("world", "secret", format!("{} characters", text.len()), format!("at least {LEAST}"))),
        }
    }

    /// The text that gives an equal secret: for the environment of a rank, and nothing else.
    pub fn to_text(&self) -> &str {
        &self.0
    }

    /// A proof of the secret for these parts, whose lengths are part of what is proved: HMAC-SHA-256.
    pub(crate) fn prove(&self, parts: &[&[u8]]) -> Bytes {
        let mut key = [0; BLOCK_BYTES];
        let secret = self.0.as_bytes();
        match secret.len() <= BLOCK_BYTES {
            true => key[..secret.len()].copy_from_slice(secret),
            false => key[..NUM_BYTES].copy_from_slice(&Sha256::digest(secret)),
        }
        let mut inner = Sha256::new();
        inner.update(key.map(|b| b ^ 0x36)); // spec: RFC 2104
        for part in parts {
            inner.update((part.len() as u64).to_le_bytes());
            inner.update(part);
        }
        let mut outer = Sha256::new();
        outer.update(key.map(|b| b ^ 0x5C)); // spec: RFC 2104
        outer.update(inner.finalize());
        outer.finalize().into()
    }

    /// Whether a proof is right; takes as long for a wrong one.
    pub(crate) fn check(&self, parts: &[&[u8]], proof: &Bytes) -> bool {
        let difference = self.prove(parts).iter().zip(proof).fold(0, |all, (a, b)| all | (a ^ b));
        std::hint::black_box(difference) == 0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// A number that nobody can guess.
pub(crate) fn nonce() -> Result<Bytes> {
    const PATH: &str = "/dev/urandom";
    let mut bytes = [0; NUM_BYTES];
    let read = File::open(PATH).and_then(|mut file| file.read_exact(&mut bytes));
    read.map(|()| bytes).map_err(|e| Error::Io { what: format!("reading {PATH}"), why: e.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// HMAC of the one part with its length before it, from Python's `hmac`.
    #[test]
    fn proofs_are_hmac() {
        let hex = |bytes: Bytes| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let long = Secret("\u{7}".repeat(100));
        assert_eq!(hex(Secret("key".into()).prove(&[b"part"])), SHORT);
        assert_eq!(hex(long.prove(&[b"part"])), LONG);
    }

    const SHORT: &str = "567be4830a37eb28155fc7a38a62e7941b959f34ac8b28e6b5fb01b3d2eb6956";
    const LONG: &str = "39102c9413fb743f7c0e8869fd58bffd8ebaa21358010ebcfbb1e497427909b6";

    #[test]
    fn a_proof_is_of_one_secret_and_one_message() {
        let (secret, other) = (Secret::random().unwrap(), Secret::random().unwrap());
        let proof = secret.prove(&[b"ab", b"c"]);
        assert!(secret.check(&[b"ab", b"c"], &proof));
        assert!(!other.check(&[b"ab", b"c"], &proof));
        assert!(!secret.check(&[b"a", b"bc"], &proof));
        assert!(!secret.check(&[b"ab", b"c"], &[0; NUM_BYTES]));
    }

    #[test]
    fn secrets_are_not_shown() {
        let secret = Secret::random().unwrap();
        let text = secret.to_text();
        assert_eq!(text.len(), 2 * NUM_BYTES);
        assert_eq!(Secret::from_text(text).unwrap().to_text(), text);
        assert_eq!(format!("{secret:?}"), "Secret(..)");
        assert!(matches!(Secret::from_text("short"), Err(Error::Invalid { .. })));
    }
}
