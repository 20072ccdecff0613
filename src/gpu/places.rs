//! Where the libraries of a CUDA toolkit may lie: a place named by the user, the loader's path, toolkits, Python packages.
#![forbid(unsafe_code)]

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// A library of the toolkit, and how to find it.
pub(super) struct ToolkitLibrary {
    /// Environment variable that names a file or a folder, which is then the only place.
    pub(super) variable: &'static str,
    /// File names, newest first: of two that the driver can run, the newer one is better.
    pub(super) names: [&'static str; 3],
    /// Folders of the Python packages that carry it.
    pub(super) packages: [&'static str; 2],
}

/// What says where a toolkit may be.
#[derive(Default)]
pub(super) struct Places {
    /// `CUDA_HOME`, `CUDA_PATH`.
    toolkits: Vec<PathBuf>,
    /// `PYTHONPATH`.
    python_paths: Vec<PathBuf>,
    /// `VIRTUAL_ENV`, `CONDA_PREFIX`, and the prefixes of the interpreters in `PATH`.
    python_prefixes: Vec<PathBuf>,
    /// Folders that may hold a toolkit: `/usr/local`.
    roots: Vec<PathBuf>,
}

fn variable(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

impl Places {
    pub(super) fn of_this_machine() -> Self {
        let list = |name: &str| env::var_os(name).map(|value| env::split_paths(&value).collect::<Vec<_>>()).unwrap_or_default();
        let interpreters = list("PATH").into_iter().map(|folder| folder.join("python3")).filter(|python| python.exists());
        // The interpreter of a virtual environment is a link to another's: both places count.
        let prefixes = interpreters.flat_map(|python| [Some(python.clone()), fs::canonicalize(python).ok()]).flatten();
        let prefixes = prefixes.filter_map(|python| Some(python.parent()?.parent()?.to_owned()));
        Places {
            toolkits: ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable).collect(),
            python_paths: list("PYTHONPATH"),
            python_prefixes: ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable).chain(prefixes).collect(),
            roots: vec![PathBuf::from("/usr/local"), PathBuf::from("/opt")],
        }
    }

    /// Folders that may hold Python packages, those named by the user first.
    pub(super) fn python_packages(&self) -> Vec<PathBuf> {
        let mut packages = self.python_paths.clone();
        for prefix in &self.python_prefixes {
            for version in sorted(&prefix.join("lib"), |name| name.starts_with("python3")) {
                packages.extend(["site-packages", "dist-packages"].map(|packages| version.join(packages)));
            }
        }
        packages
    }
}

/// Entries of a folder whose names are accepted, the last name first.
fn sorted(folder: &Path, accept: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| accept(name)).collect();
    names.sort_by(|a, b| b.cmp(a));
    names.into_iter().map(|name| folder.join(name)).collect()
}

impl ToolkitLibrary {
    /// Every place to try, in order.
    pub(super) fn candidates(&self, places: &Places) -> Vec<PathBuf> {
        match variable(self.variable) {
            Some(named) => self.named(named),
            None => self.usual(places),
        }
    }

    fn in_folder(&self, folder: &Path) -> Vec<PathBuf> {
        self.names.map(|name| folder.join(name)).to_vec()
    }

    /// Named by the user: that place alone.
    fn named(&self, path: PathBuf) -> Vec<PathBuf> {
        if path.is_dir() { self.in_folder(&path) } else { vec![path] }
    }

    fn usual(&self, places: &Places) -> Vec<PathBuf> {
        let mut folders = Vec::new();
        let toolkits = places.roots.iter().flat_map(|root| sorted(root, |name| name.starts_with("cuda")));
        for toolkit in places.toolkits.iter().cloned().chain(toolkits) {
            folders.extend(["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"].map(|lib| toolkit.join(lib)));
        }
        for packages in places.python_packages() {
            folders.extend(self.packages.map(|lib| packages.join(lib)));
        }
        let bare = self.names.map(PathBuf::from);
        // A folder that is not there would only make the list of places long.
        bare.into_iter().chain(folders.iter().filter(|folder| folder.is_dir()).flat_map(|folder| self.in_folder(folder))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIBRARY: ToolkitLibrary = ToolkitLibrary {
        variable: "MOE_NO_SUCH_VARIABLE",
        names: ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
        packages: ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
    };

    #[test]
    fn places_in_their_order() {
        let root = tempfile::tempdir().unwrap();
        let folder = |name: &str| {
            let path = root.path().join(name);
            fs::create_dir_all(&path).unwrap();
            path
        };
        folder("local/cuda-12.8/lib64");
        folder("local/cuda-13.0/lib64");
        folder("home/lib64");
        folder("venv/lib/python3.12/site-packages/nvidia/cu13/lib");
        folder("path/nvidia/cuda_nvrtc/lib");
        let places = Places {
            toolkits: vec![root.path().join("home")],
            python_paths: vec![root.path().join("path")],
            python_prefixes: vec![root.path().join("venv")],
            roots: vec![root.path().join("local")],
        };
        let found = LIBRARY.candidates(&places);
        let found: Vec<_> = found.iter().map(|path| path.strip_prefix(root.path()).unwrap_or(path).to_str().unwrap()).collect();
        let firsts: Vec<_> = found.iter().step_by(3).copied().collect();
        assert_eq!(
            firsts,
            [
                "libnvrtc.so.13",
                "home/lib64/libnvrtc.so.13",
                "local/cuda-13.0/lib64/libnvrtc.so.13",
                "local/cuda-12.8/lib64/libnvrtc.so.13",
                "path/nvidia/cuda_nvrtc/lib/libnvrtc.so.13",
                "venv/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
            ]
        );
        assert_eq!(found[1..3], ["libnvrtc.so.12", "libnvrtc.so"]);
        assert_eq!(LIBRARY.named(root.path().join("home/lib64")).len(), 3);
        assert_eq!(LIBRARY.named("/nowhere/libnvrtc.so".into()), [PathBuf::from("/nowhere/libnvrtc.so")]);
    }
}
