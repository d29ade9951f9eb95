// sluice-profile: measures what policies have to know beforehand. All of it is in src/profile.
#include <string>
#include <vector>

#include "src/profile/command.h"

int main(int argc, char** argv) {
  return sluice::RunProfileCommand(std::vector<std::string>(argv + 1, argv + argc));
}
