//! `make deb`: the Debian package that has DKMS build Gannet for each installed kernel.

use crate::{module, progress::Step};
use anyhow::{Context, Result};
use gannet_lab::{Kernel, Layout};
use std::process::Stdio;

/// Builds the package, has lintian look at it where there is one, and prints the file. Whether lintian found nothing.
pub fn command(layout: &Layout) -> Result<bool> {
    layout.ensure(&["toolchain"])?;
    let core = module::build_core(layout, Kernel::V6_12)?;
    let version = env!("CARGO_PKG_VERSION");
    let package = layout.out.join(format!("gannet-dkms_{version}_amd64.deb"));
    let step = Step::start(layout, "packing the Debian package");
    let mut script = layout.tool("sh");
    script.arg(layout.root.join("linux/debian/build.sh")).arg(version).arg(&core).arg(&package);
    module::follow(&mut script, &step).context("the package does not build")?;
    step.done();
    println!("{}", package.display());
    let there = layout.tool("lintian").arg("--version").stdout(Stdio::null()).status();
    if !there.is_ok_and(|status| status.success()) {
        eprintln!("lintian is not installed: not checked");
        return Ok(true);
    }
    let found = layout.tool("lintian").arg("--fail-on=error,warning").arg(&package).status()?;
    Ok(found.success())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    /// Where there is one kernel to build for, and a DKMS that notes what it is asked to do.
    struct Machine(PathBuf);

    impl Machine {
        /// `status` is what DKMS says of the module.
        fn new(name: &str, status: &str) -> Self {
            let name = format!("gannet-package-{}-{name}", std::process::id());
            let root = std::env::temp_dir().join(name);
            fs::create_dir_all(root.join("modules/6.99/build")).unwrap();
            let (dkms, log) = (root.join("dkms"), root.join("log"));
            let stub = format!(
                "#!/bin/sh\n[ $1 = status ] && echo '{status}' || echo \"$*\" >>{}\n",
                log.display()
            );
            fs::write(&dkms, stub).unwrap();
            fs::set_permissions(&dkms, fs::Permissions::from_mode(0o755)).unwrap();
            Self(root)
        }

        /// What the script has asked of DKMS.
        fn asked(&self, script: &str, argument: &str) -> Vec<String> {
            let debian = Path::new(env!("CARGO_MANIFEST_DIR")).join("../linux/debian");
            let read = |name| fs::read_to_string(debian.join(name)).unwrap();
            let text = read(script)
                .replace("@IN_USE@", &read("in-use.sh"))
                .replace("@VERSION@", "9")
                .replace("/lib/modules", &self.0.join("modules").display().to_string())
                .replace("/sys/module", &self.0.join("none").display().to_string());
            let path = format!("{}:{}", self.0.display(), std::env::var("PATH").unwrap());
            let mut shell = Command::new("sh");
            let ran = shell.args(["-c", &text, script, argument]).env("PATH", path).output();
            assert!(ran.unwrap().status.success(), "{script} {argument}");
            let log = fs::read_to_string(self.0.join("log")).unwrap_or_default();
            log.lines().map(str::to_owned).collect()
        }
    }

    impl Drop for Machine {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const ABORTED: [&str; 3] = ["abort-upgrade", "abort-remove", "abort-deconfigure"];

    /// Before whatever went wrong prerm has taken the modules away.
    #[test]
    fn a_package_that_stays_has_its_modules_built_again() {
        for aborted in ABORTED.into_iter().chain(["configure"]) {
            let asked = Machine::new(aborted, "").asked("postinst", aborted);
            let built = ["add -m gannet -v 9", "install -m gannet -v 9 -k 6.99 --force"];
            assert_eq!(asked, built, "{aborted}");
        }
        for going in ["upgrade", "remove", "deconfigure"] {
            let asked = Machine::new(going, "").asked("prerm", going);
            assert_eq!(asked, ["remove -m gannet -v 9 --all"], "{going}");
        }
    }

    /// Where prerm has refused, since virtual machines run, nothing was taken away.
    #[test]
    fn modules_that_are_still_there_are_not_built_again() {
        for aborted in ABORTED {
            let there =
                Machine::new(&format!("{aborted}-there"), "gannet/9, 6.99, x86_64: installed");
            assert_eq!(there.asked("postinst", aborted), [""; 0], "{aborted}");
        }
    }
}
