//! How much memory this process may still allocate.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};

/// Bytes that this process may still allocate: the kernel's estimate, or what is left of the control group's limit if that is lower. `None` where
/// neither is known.
pub fn available_bytes() -> Option<u64> {
    available_in(Path::new("/"))
}

/// The same, of a system whose files are under `root`.
fn available_in(root: &Path) -> Option<u64> {
    let read = |path: PathBuf| std::fs::read_to_string(path).ok();
    let machine = read(root.join("proc/meminfo")).and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    });
    let groups = read(root.join("proc/self/cgroup")).unwrap_or_default();
    let limits = groups.lines().flat_map(|line| {
        // `0::/path` (version 2) or `n:controllers:/path`; only a memory controller limits.
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next().unwrap_or(""), fields.next().unwrap_or(""));
        let (mount, names) = match controllers {
            "" => ("sys/fs/cgroup", ["memory.max", "memory.current"]),
            c if c.split(',').any(|c| c == "memory") => ("sys/fs/cgroup/memory", ["memory.limit_in_bytes", "memory.usage_in_bytes"]),
            _ => return Vec::new(),
        };
        let mount = root.join(mount);
        let leaf = mount.join(path.trim_start_matches('/'));
        // Each group on the way up limits too. In a container the path may be that of the host: then only the mount is there.
        leaf.ancestors().take_while(|dir| dir.starts_with(&mount)).filter_map(|dir| left_in_group(dir, names)).collect()
    });
    machine.into_iter().chain(limits).min()
}

/// What is left of one group's limit; file pages that can be dropped count as free.
fn left_in_group(dir: &Path, [limit, usage]: [&str; 2]) -> Option<u64> {
    let number = |name: &str| std::fs::read_to_string(dir.join(name)).ok()?.trim().parse::<u64>().ok();
    let stat = std::fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let field = |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    let droppable = field("total_inactive_file ").or_else(|| field("inactive_file ")).unwrap_or(0);
    Some(number(limit)?.saturating_sub(number(usage)?.saturating_sub(droppable)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn system(files: &[(&str, &str)]) -> (tempfile::TempDir, Option<u64>) {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let found = available_in(dir.path());
        (dir, found)
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal:       100 kB\nMemAvailable:     50 kB\n");

    #[test]
    fn the_lowest_limit_counts() {
        assert_eq!(system(&[]).1, None);
        assert_eq!(system(&[MEMINFO]).1, Some(51200));
        let group = ("proc/self/cgroup", "0::/a/b\n");
        let unlimited = ("sys/fs/cgroup/a/b/memory.max", "max\n");
        assert_eq!(system(&[MEMINFO, group, unlimited]).1, Some(51200));
        let parent = [("sys/fs/cgroup/a/memory.max", "40000\n"), ("sys/fs/cgroup/a/memory.current", "10000\n")];
        assert_eq!(system(&[MEMINFO, group, unlimited, parent[0], parent[1]]).1, Some(30000));
        let stat = ("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 6000\n");
        assert_eq!(system(&[MEMINFO, group, parent[0], parent[1], stat]).1, Some(36000));
        let full = ("sys/fs/cgroup/a/memory.current", "50000\n");
        assert_eq!(system(&[MEMINFO, group, parent[0], full]).1, Some(0));
    }

    #[test]
    fn version_1_groups_and_foreign_paths() {
        let group = ("proc/self/cgroup", "5:cpu:/x\n4:memory,other:/on/the/host\n");
        let mount = [
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "20000"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "5000"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 100\n"),
        ];
        assert_eq!(system(&[MEMINFO, group, mount[0], mount[1], mount[2]]).1, Some(15100));
    }

    #[test]
    fn garbage_is_unknown() {
        let files = [("proc/meminfo", "MemAvailable: x kB"), ("proc/self/cgroup", "::\n\nnonsense"), ("sys/fs/cgroup/memory.max", "-3")];
        assert_eq!(system(&files).1, None);
    }
}
