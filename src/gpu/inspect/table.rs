//! The committed table, and how two versions of it differ.
#![forbid(unsafe_code)]

use super::{Report, Vendor};

/// `docs/resources.md`: `compilers` are the names that [`Compilers::version`](super::Compilers::version) gives, `reports` are in the order of the catalogue.
pub fn markdown(compilers: &[(Vendor, String)], reports: &[Report]) -> String {
    let versions: Vec<String> = compilers.iter().map(|(vendor, version)| format!("{vendor}: {version}")).collect();
    let mut text = format!(
        "# Resources of every kernel

Made by `moe inspect --markdown`; `.ci/run` compares it with `moe inspect --check docs/resources.md` and fails on a difference, a spill, local
memory, registers above the kernel's budget, or a block that does not fit in shared memory.

Compilers: {}.

Registers of a thread with the most that the kernel may use; on AMD vector registers (with accumulation registers), whose budget is the NVIDIA one
times the ratio of the register files, and scalar registers of a wave. Spills: bytes on NVIDIA, vector and scalar registers on AMD. Stack: bytes of local
memory of a thread. Shared memory: static and dynamic bytes of a block. Code: bytes.

| kernel | arch | registers | scalar | spills | stack | shared memory | code |
|---|---|---:|---:|---:|---:|---:|---:|
",
        versions.join("; ")
    );
    for report in reports {
        text.push_str(&format!("| {} |\n", cells(report).join(" | ")));
    }
    text
}

/// A row of a table: kernel, architecture, registers of how many, scalar registers, spills, stack, shared memory, code.
pub fn cells(report: &Report) -> [String; 8] {
    let resources = &report.resources;
    let or_dash = |number: Option<u32>| number.map_or("-".to_owned(), |number| number.to_string());
    [
        report.kernel.clone(),
        report.arch.clone(),
        format!("{} of {}", resources.registers, or_dash(report.max_registers)),
        or_dash(resources.scalar_registers),
        match resources.scalar_spills {
            0 => resources.spills.to_string(),
            scalar => format!("{} + {scalar} scalar", resources.spills),
        },
        resources.stack_bytes.to_string(),
        report.smem_bytes.to_string(),
        resources.code_bytes.to_string(),
    ]
}

/// What turns one text into another, line by line: `-` before a line that only `old` has, `+` before one that only `new` has. Empty when they are equal.
pub fn difference(old: &str, new: &str) -> Vec<String> {
    let (old, new): (Vec<&str>, Vec<&str>) = (old.lines().collect(), new.lines().collect());
    // common[i][j]: most lines in common of old[i..] and new[j..], in order.
    let mut common = vec![vec![0u32; new.len() + 1]; old.len() + 1];
    for i in (0..old.len()).rev() {
        for j in (0..new.len()).rev() {
            common[i][j] = if old[i] == new[j] { common[i + 1][j + 1] + 1 } else { common[i + 1][j].max(common[i][j + 1]) };
        }
    }
    let (mut i, mut j) = (0, 0);
    let mut lines = Vec::new();
    while i < old.len() || j < new.len() {
        if i < old.len() && j < new.len() && old[i] == new[j] {
            (i, j) = (i + 1, j + 1);
        } else if j == new.len() || (i < old.len() && common[i + 1][j] >= common[i][j + 1]) {
            lines.push(format!("- {}", old[i]));
            i += 1;
        } else {
            lines.push(format!("+ {}", new[j]));
            j += 1;
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::super::tests::{GOOD, program};
    use super::super::{Arch, Resources};
    use super::*;

    fn table(registers: u32) -> String {
        let on = |arch: &str, resources| Report::new(&program(64, 16), &Arch::from_name(arch).unwrap(), resources);
        let amd = Resources { registers, scalar_registers: Some(20), ..GOOD };
        let reports = [on("sm_90a", GOOD), on("gfx950", amd), on("gfx1030", Resources { spills: 2, scalar_spills: 3, ..amd })];
        markdown(&[(Vendor::Nvidia, "NVRTC 13.0.88".into()), (Vendor::Amd, "clang version 22.1.8".into())], &reports)
    }

    #[test]
    fn a_line_for_each_pair() {
        let text = table(80);
        let rows: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("|---")).skip(1).collect();
        let want = [
            "| probe | sm_90a | 64 of 64 | - | 0 | 0 | 1040 | 100 |",
            "| probe | gfx950 | 80 of 128 | 20 | 0 | 0 | 1040 | 100 |",
            "| probe | gfx1030 | 80 of - | 20 | 2 + 3 scalar | 0 | 1040 | 100 |",
        ];
        assert_eq!(rows, want);
        assert!(text.contains("\nCompilers: NVIDIA: NVRTC 13.0.88; AMD: clang version 22.1.8.\n"), "{text}");
        let columns = |line: &str| line.matches('|').count();
        assert!(text.lines().filter(|line| line.starts_with('|')).all(|line| columns(line) == columns(want[0])), "{text}");
    }

    #[test]
    fn a_difference_names_both_lines() {
        assert_eq!(difference(&table(80), &table(80)), [""; 0]);
        let want = [
            "- | probe | gfx950 | 80 of 128 | 20 | 0 | 0 | 1040 | 100 |",
            "- | probe | gfx1030 | 80 of - | 20 | 2 + 3 scalar | 0 | 1040 | 100 |",
            "+ | probe | gfx950 | 81 of 128 | 20 | 0 | 0 | 1040 | 100 |",
            "+ | probe | gfx1030 | 81 of - | 20 | 2 + 3 scalar | 0 | 1040 | 100 |",
        ];
        assert_eq!(difference(&table(80), &table(81)), want);
        let cases: [(&str, &str, &[&str]); 6] = [
            ("", "", &[]),
            ("", "a", &["+ a"]),
            ("a", "", &["- a"]),
            ("a\nb\nc", "a\nc", &["- b"]),
            ("a\nc", "a\nb\nc\nd", &["+ b", "+ d"]),
            ("a\nb", "b\na", &["- a", "+ a"]),
        ];
        for (old, new, want) in cases {
            assert_eq!(difference(old, new), want, "{old:?} {new:?}");
        }
    }
}
