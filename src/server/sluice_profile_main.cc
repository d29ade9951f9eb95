// sluice-profile measures what attention policies have to know about a model beforehand. Its code
// is in src/profile.
#include <string>
#include <vector>

#include "src/profile/command.h"

int main(int argc, char** argv) {
  return sluice::RunProfileCommand(std::vector<std::string>(argv + 1, argv + argc));
}
