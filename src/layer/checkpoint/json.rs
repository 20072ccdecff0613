//! JSON that names nothing twice.
//!
//! Parsers differ in which of two equal keys they take, so a file that has them means different things to different readers: it is refused. Depth is
//! bounded by serde_json (128), size by the caller.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

use serde::de::{DeserializeOwned, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, de};

use crate::error::{Error, Result};

/// Longest quotation in a message (arbitrary: a line or two).
const MAX_QUOTED: usize = 160;

/// The error of a file without lines.
pub(super) fn wrong(path: &Path, why: impl Into<String>) -> Error {
    Error::Format { path: path.to_path_buf(), line: 0, why: why.into() }
}

/// Text of a file, cut to what a message should hold.
pub(super) fn quoted(text: &str) -> String {
    match text.char_indices().nth(MAX_QUOTED) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_string(),
    }
}

/// Parses the whole of `bytes`.
pub(super) fn parse<T: DeserializeOwned>(bytes: &[u8], path: &Path) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| Error::Format {
        path: path.to_path_buf(),
        line: error.line() as u64,
        why: quoted(&error.to_string()),
    })
}

/// A value without duplicate keys anywhere.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Json {
    Null,
    Bool(bool),
    Number(serde_json::Number),
    Text(String),
    List(Vec<Json>),
    Object(HashMap<String, Json>),
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(Json::Number(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Number(value.into()))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Json, E> {
        serde_json::Number::from_f64(value).map(Json::Number).ok_or_else(|| E::custom("a number is not finite"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(Json::Text(value.to_string()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Json, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = list.next_element()? {
            values.push(value);
        }
        Ok(Json::List(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Json, A::Error> {
        Ok(Json::Object(unique(map, None)?))
    }
}

/// An object whose keys are all different, without the value of `__metadata__` if it has one.
#[derive(Debug)]
pub(super) struct Unique<V>(pub(super) HashMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Unique<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UniqueVisitor(PhantomData)).map(Unique)
    }
}

struct UniqueVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueVisitor<V> {
    type Value = HashMap<String, V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        unique(map, Some("__metadata__"))
    }
}

/// All entries of an object; the value of `skipped` is not looked at.
fn unique<'de, V: Deserialize<'de>, A: MapAccess<'de>>(mut map: A, skipped: Option<&str>) -> Result<HashMap<String, V>, A::Error> {
    let mut entries = HashMap::new();
    let mut was_skipped = false;
    while let Some(key) = map.next_key::<String>()? {
        let is_skipped = skipped == Some(&key);
        if is_skipped && was_skipped || entries.contains_key(&key) {
            return Err(A::Error::custom(format!("the key `{}` is there twice", quoted(&key))));
        }
        if is_skipped {
            map.next_value::<IgnoredAny>()?;
            was_skipped = true;
        } else {
            let value = map.next_value()?;
            entries.insert(key, value);
        }
    }
    Ok(entries)
}

impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Json::Null => f.write_str("null"),
            Json::Bool(value) => write!(f, "{value}"),
            Json::Number(value) => write!(f, "{value}"),
            Json::Text(value) => write!(f, "`{}`", quoted(value)),
            Json::List(values) => write!(f, "a list of {}", values.len()),
            Json::Object(_) => f.write_str("an object"),
        }
    }
}
