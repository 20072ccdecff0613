//! Finding shared libraries at run time, and typed tables of their functions.

use std::path::{Path, PathBuf};

use libloading::Library;

use crate::error::{Error, Result};

/// Opens the first candidate that loads and that `accept` turns into a table; an error lists every place with the reason why not.
pub(super) fn open<T>(
    name: &str,
    candidates: impl IntoIterator<Item = PathBuf>,
    accept: impl Fn(Library, &Path) -> Result<T, String>,
) -> Result<T> {
    let mut searched = Vec::new();
    for path in candidates {
        if searched.contains(&path) {
            continue;
        }
        // SAFETY: the candidates are the vendor's own libraries, by their file names; their initialisers run as in every program that links them.
        let opened = unsafe { Library::new(&path) };
        match opened.map_err(|error| reason(&error)).and_then(|library| accept(library, &path)) {
            Ok(table) => return Ok(table),
            Err(why) if path.is_absolute() && !path.exists() => {
                let _ = why; // the loader only says that it is not there
                searched.push(path);
            }
            Err(why) => searched.push(PathBuf::from(format!("{} ({why})", path.display()))),
        }
    }
    Err(Error::Library { name: name.into(), searched })
}

/// Loads a library that another one will look for by its name, for the life of the process.
pub(super) fn keep(path: &Path) -> Result<(), String> {
    // SAFETY: a vendor's own library, by its file name; its initialisers run as in every program that links it.
    let library = unsafe { Library::new(path) }.map_err(|error| reason(&error))?;
    std::mem::forget(library);
    Ok(())
}

/// The loader's own words.
fn reason(error: &libloading::Error) -> String {
    use std::error::Error as _;
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        text = inner.to_string();
        source = inner.source();
    }
    text
}

/// Declares a table: a struct of function pointers, filled from a library by symbol name, with one method for each that turns a status that is not 0
/// into an error. The names of the methods are neutral, so that another vendor's library can fill a table of the same shape.
macro_rules! table {
    ($(#[$doc:meta])* $table:ident, $status:path { $($(#[$entry_doc:meta])* $entry:ident = $symbol:literal ($($argument:ident: $ty:ty),* $(,)?);)* }) => {
        $(#[$doc])*
        pub struct $table {
            $($entry: unsafe extern "C" fn($($ty),*) -> i32,)*
            called: [std::sync::atomic::AtomicBool; Self::SYMBOLS.len()],
            path: std::path::PathBuf,
            /// Keeps the functions mapped.
            _library: libloading::Library,
        }

        impl $table {
            /// Every symbol of the table.
            pub const SYMBOLS: &'static [&'static str] = &[$($symbol),*];

            /// Fills the table; the text of an error says what is missing.
            fn fill(library: libloading::Library, path: &std::path::Path) -> Result<Self, String> {
                Ok(Self {
                    $($entry: {
                        // SAFETY: the type is that of the function in the vendor's header, by the symbol's name.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($ty),*) -> i32>(concat!($symbol, "\0")) };
                        *symbol.map_err(|_| format!("lacks {}", $symbol))?
                    },)*
                    called: std::array::from_fn(|_| std::sync::atomic::AtomicBool::new(false)),
                    path: path.to_owned(),
                    _library: library,
                })
            }

            /// Where the library was found.
            pub fn path(&self) -> &std::path::Path {
                &self.path
            }

            /// The symbols that no call has reached yet, for the test that reaches each.
            pub fn never_called(&self) -> Vec<&'static str> {
                let called = self.called.iter().map(|called| called.load(std::sync::atomic::Ordering::Relaxed));
                Self::SYMBOLS.iter().zip(called).filter(|(_, called)| !called).map(|(symbol, _)| *symbol).collect()
            }

            table!(@methods $table, $status, 0usize; $($(#[$entry_doc])* $entry = $symbol ($($argument: $ty),*);)*);
        }
    };
    (@methods $table:ident, $status:path, $index:expr;) => {};
    (@methods $table:ident, $status:path, $index:expr; $(#[$doc:meta])* $entry:ident = $symbol:literal ($($argument:ident: $ty:ty),*); $($rest:tt)*) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// That of the vendor's function.
        #[allow(clippy::too_many_arguments, dead_code)]
        pub(super) unsafe fn $entry(&self, $($argument: $ty),*) -> crate::error::Result<()> {
            let called = &self.called[$index];
            if !called.load(std::sync::atomic::Ordering::Relaxed) {
                called.store(true, std::sync::atomic::Ordering::Relaxed);
            }
            // SAFETY: the caller's promise.
            match unsafe { (self.$entry)($($argument),*) } {
                0 => Ok(()),
                code => Err($status(self, $symbol, code)),
            }
        }
        table!(@methods $table, $status, $index + 1usize; $($rest)*);
    };
}
pub(super) use table;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_is_named_once() {
        let places = ["libmoe-kernels-nowhere.so.1", "/nowhere/libmoe.so", "/nowhere/libmoe.so"].map(PathBuf::from);
        let error = open("nothing", places, |_, _| Ok::<(), String>(())).unwrap_err();
        let Error::Library { name, searched } = &error else { panic!("{error}") };
        assert_eq!((name.as_str(), searched.len()), ("nothing", 2));
        assert!(searched[0].to_string_lossy().starts_with("libmoe-kernels-nowhere.so.1 ("), "{error}");
        assert_eq!(searched[1], PathBuf::from("/nowhere/libmoe.so"));
    }

    #[test]
    fn a_library_that_is_refused_says_why() {
        // The C library is there on every machine that this runs on.
        let error = open("c", [PathBuf::from("libc.so.6")], |_, _| Err::<(), _>("too old".into())).unwrap_err();
        assert!(error.to_string().contains("libc.so.6 (too old)"), "{error}");
    }
}
