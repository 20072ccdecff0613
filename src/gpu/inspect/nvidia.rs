//! Resources from what NVRTC gives back: ptxas's words in the log, and the sections of the cubin.
#![forbid(unsafe_code)]

use super::Resources;

/// Registers and memory as the log of `--ptxas-options=-v` tells them, the size of the code from the image; the text of an error says what was missing.
pub fn resources(entry: &str, log: &str, image: &[u8]) -> Result<Resources, String> {
    let missing = |what: &str| format!("no {what} of `{entry}` in what the compiler said:\n{log}");
    // A function that was not inlined has properties of its own: a spill there is a spill of the kernel.
    let sum = |unit: &str| log.lines().filter_map(|line| number_before(line, unit)).sum();
    let of_entry = log.split_once(&format!("Compiling entry function '{entry}'")).ok_or_else(|| missing("registers"))?.1;
    let used = of_entry.lines().find(|line| line.contains(": Used ")).ok_or_else(|| missing("registers"))?;
    log.lines().find(|line| line.contains("bytes spill stores")).ok_or_else(|| missing("spills"))?;
    Ok(Resources {
        registers: number_before(used, "registers").ok_or_else(|| missing("registers"))?,
        scalar_registers: None,
        spills: sum("bytes spill stores"),
        scalar_spills: 0,
        stack_bytes: sum("bytes stack frame"),
        static_smem_bytes: number_before(used, "bytes smem").unwrap_or(0),
        code_bytes: section_bytes(image, &format!(".text.{entry}")).ok_or_else(|| missing("code"))?,
        lanes: 32,
    })
}

/// The number that stands before `unit` in a line: 7 in `Used 7 registers, used 0 barriers`.
fn number_before(line: &str, unit: &str) -> Option<u32> {
    let (before, _) = line.split_once(&format!(" {unit}"))?;
    let start = before.rfind(|c: char| !c.is_ascii_digit()).map_or(0, |at| at + 1);
    before[start..].parse().ok()
}

/// Bytes of a section of an ELF64 file, little-endian (spec: System V ABI, object files).
fn section_bytes(image: &[u8], name: &str) -> Option<u32> {
    const SECTION_TABLE: usize = 0x28; // e_shoff
    const SECTION_SIZE: usize = 0x3A; // e_shentsize, e_shnum, e_shstrndx
    let number = |at: usize, bytes: usize| {
        let field = image.get(at..at.checked_add(bytes)?)?;
        usize::try_from(field.iter().rev().fold(0u64, |value, byte| value << 8 | u64::from(*byte))).ok()
    };
    if !image.starts_with(b"\x7FELF\x02\x01") {
        return None;
    }
    let (table, size) = (number(SECTION_TABLE, 8)?, number(SECTION_SIZE, 2)?);
    let (num, names_idx) = (number(SECTION_SIZE + 2, 2)?, number(SECTION_SIZE + 4, 2)?);
    // Of a section header: its name at 0, where it lies at 0x18, its bytes at 0x20.
    let header = |idx: usize| idx.checked_mul(size)?.checked_add(table);
    let names = number(header(names_idx)?.checked_add(0x18)?, 8)?;
    for idx in 0..num {
        let header = header(idx)?;
        let text = image.get(names.checked_add(number(header, 4)?)?..)?;
        if text.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.first() == Some(&0)) {
            return number(header.checked_add(0x20)?, 8)?.try_into().ok();
        }
    }
    None
}

/// The compiler's own release as its images carry it: `13.0.88`.
pub fn release(image: &[u8]) -> Option<String> {
    const BEFORE: &[u8] = b"Cuda compilation tools, release ";
    let at = image.windows(BEFORE.len()).position(|window| window == BEFORE)?;
    let line = image[at..].split(|byte| *byte == 0 || *byte == b'\n').next()?;
    let text = std::str::from_utf8(line).ok()?;
    text.rsplit_once('V').map(|(_, release)| release.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What NVRTC 13.0 says of a kernel that spills on sm_80, and of the same on sm_90a where it does not.
    const SPILLS: &str = "ptxas info    : 4 bytes gmem, 8 bytes cmem[4]
ptxas info    : Compiling entry function 'probe' for 'sm_80'
ptxas info    : Function properties for probe
ptxas         .     320 bytes stack frame, 328 bytes spill stores, 336 bytes spill loads
ptxas info    : Used 64 registers, used 0 barriers, 320 bytes cumulative stack size, 128 bytes smem, 368 bytes cmem[0]
ptxas info    : Compile time = 102.850 ms
";
    const GOOD: &str = "ptxas info    : 4 bytes gmem
ptxas info    : Compiling entry function 'probe' for 'sm_90a'
ptxas info    : Function properties for probe
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers
ptxas info    : Compile time = 11.844 ms
";
    /// A function that was not inlined spills.
    const CALLS: &str = "ptxas info    : Compiling entry function 'probe' for 'sm_90a'
ptxas info    : Function properties for helper
    8 bytes stack frame, 12 bytes spill stores, 12 bytes spill loads
ptxas info    : Function properties for probe
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 24 bytes cumulative stack size
";

    /// An ELF file with nothing but section headers: one of `.text.probe` with 1280 bytes, and the names.
    fn image() -> Vec<u8> {
        const NAMES: &[u8] = b"\0.shstrtab\0.text.probe_two\0.text.probe\0";
        let mut image = vec![0u8; 0x40];
        image[..6].copy_from_slice(b"\x7FELF\x02\x01");
        image.extend_from_slice(NAMES);
        let table = image.len() as u64;
        for (name, at, bytes) in [(0u32, 0u64, 0u64), (11, 0, 7), (1, 0x40, NAMES.len() as u64), (27, 0, 1280)] {
            let mut header = [0u8; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&at.to_le_bytes());
            header[0x20..0x28].copy_from_slice(&bytes.to_le_bytes());
            image.extend_from_slice(&header);
        }
        image[0x28..0x30].copy_from_slice(&table.to_le_bytes());
        for (at, value) in [(0x3A, 64u16), (0x3C, 4), (0x3E, 2)] {
            image[at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
        image
    }

    #[test]
    fn the_log_of_ptxas() {
        let good = Resources {
            registers: 32,
            scalar_registers: None,
            spills: 0,
            scalar_spills: 0,
            stack_bytes: 0,
            static_smem_bytes: 0,
            code_bytes: 1280,
            lanes: 32,
        };
        assert_eq!(resources("probe", GOOD, &image()), Ok(good));
        let spills = Resources { registers: 64, spills: 328, stack_bytes: 320, static_smem_bytes: 128, ..good };
        assert_eq!(resources("probe", SPILLS, &image()), Ok(spills));
        let calls = Resources { registers: 40, spills: 12, stack_bytes: 24, ..good };
        assert_eq!(resources("probe", CALLS, &image()), Ok(calls));
    }

    /// A log that does not say everything is an error, never a kernel without spills.
    #[test]
    fn nothing_is_taken_for_granted() {
        for line in 1..GOOD.lines().count() - 1 {
            let cut: Vec<&str> = GOOD.lines().enumerate().filter(|(number, _)| *number != line).map(|(_, text)| text).collect();
            let result = resources("probe", &cut.join("\n"), &image());
            // The properties' own heading is the one line that carries nothing.
            assert_eq!(result.is_ok(), line == 2, "without line {line}: {result:?}");
        }
        for entry in ["prob", "other"] {
            assert!(resources(entry, GOOD, &image()).is_err(), "{entry}");
        }
        assert!(resources("probe", GOOD, b"").unwrap_err().contains("no code of `probe`"));
    }

    #[test]
    fn sections_of_a_damaged_image() {
        let good = image();
        assert_eq!(section_bytes(&good, ".text.probe"), Some(1280));
        assert_eq!(section_bytes(&good, ".text.prob"), None);
        // What follows the size in the last header is not read.
        for cut in 0..good.len() - (64 - 0x28) {
            assert_eq!(section_bytes(&good[..cut], ".text.probe"), None, "{cut} bytes");
        }
        for at in 0..0x40 {
            let mut bad = good.clone();
            bad[at] = 0xFF;
            let _ = section_bytes(&bad, ".text.probe"); // no panic
        }
    }

    #[test]
    fn release_of_the_compiler() {
        assert_eq!(release(b"\0\x01Cuda compilation tools, release 13.0, V13.0.88\0Build").as_deref(), Some("13.0.88"));
        assert_eq!(release(b"nothing"), None);
    }
}
